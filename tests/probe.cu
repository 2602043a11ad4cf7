// Writes back what it was passed: proves that parameters arrive with the width and the value that the caller gave (A22).
struct Params {
    long long stride;
    int tokens;
    float factor;
    long long* out;  // [3]
};

extern "C" __global__ void probe(const __grid_constant__ Params p) {
    p.out[0] = p.stride;
    p.out[1] = p.tokens;
    p.out[2] = static_cast<long long>(p.factor * 1000.0f);
}
