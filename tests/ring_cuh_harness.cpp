// Calls every function of ring.cuh on the host. Reads lines "function arguments…", writes one result a line.
#include <cstdio>
#include <cstring>

#include "ring.cuh"

using namespace zos;

int main() {
    char name[64];
    long long a[7];
    char line[256];
    while (std::fgets(line, sizeof line, stdin)) {
        std::memset(a, 0, sizeof a);
        std::sscanf(line, "%63s %lld %lld %lld %lld %lld %lld %lld", name, a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6);
        const auto i = [&](int k) { return static_cast<int>(a[k]); };
        const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
        int result;
        if (is("quotient")) result = quotient(i(0), make_divisor(i(1)));
        else if (is("remainder")) result = remainder(i(0), make_divisor(i(1)));
        else if (is("window_begin")) result = window_begin(i(0), i(1), i(2));
        else if (is("ring_slot")) result = ring_slot(i(0), make_divisor(i(1)));
        else if (is("ring_advance")) result = ring_advance(i(0), i(1), i(2));
        else if (is("history_start")) result = history_start(i(0), i(1), i(2));
        else if (is("chunk_start")) result = chunk_start(i(0), i(1));
        else if (is("compressed_index")) result = compressed_index(i(0), make_divisor(i(1)), i(2));
        else if (is("tail_begin")) result = tail_begin(i(0), i(1), i(2), i(3), i(4));
        else if (is("tail_valid_start")) result = tail_valid_start(i(0), i(1), i(2), i(3), i(4), i(5));
        else if (is("row_places")) result = row_places(i(0), i(1), i(2));
        else if (is("row_error")) result = row_error(i(0), i(1), i(2), i(3), i(4), i(5));
        else if (is("row_error_value")) result = row_error_value(i(0), i(1), i(2), i(3));
        else if (is("kept_error")) result = kept_error(i(0), i(1), i(2));
        else if (is("kept_before_stop")) result = kept_before_stop(i(0), i(1), i(2));
        else if (is("next_seqlen_q")) result = next_seqlen_q(i(0), i(1), i(2), i(3), i(4), i(5), i(6));
        else if (is("until_boundary")) result = until_boundary(i(0), i(1));
        else if (is("snapshot_boundary")) result = snapshot_boundary(i(0), i(1), i(2), i(3), i(4), i(5), i(6));
        else if (is("history_padding")) result = history_padding(i(0), i(1), i(2));
        else if (is("overwritten")) result = overwritten(i(0), i(1), i(2));
        else if (is("e8m0_round_up")) result = e8m0_round_up(static_cast<unsigned>(a[0]));
        else if (is("e8m0_value")) result = static_cast<int>(bits_of(e8m0_value(i(0))));
        else if (is("e8m0_inverse")) result = static_cast<int>(bits_of(e8m0_inverse(i(0))));
        else if (is("e4m3_round")) result = e4m3_round(float_of(static_cast<unsigned>(a[0])));
        else if (is("e4m3_value")) result = static_cast<int>(bits_of(e4m3_value(i(0))));
        else if (is("multiplier")) result = static_cast<int>(make_divisor(i(0)).multiplier);
        else if (is("shift")) result = make_divisor(i(0)).shift;
        else return 2;
        std::printf("%d\n", result);
    }
    return 0;
}
