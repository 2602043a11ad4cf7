// One fault for each compute-sanitizer tool: a tool that does not report its fault was not on.
extern "C" __global__ void memcheck_fault(int* memory, int size) { memory[size + threadIdx.x] = 1; }

extern "C" __global__ void racecheck_fault(int* memory, int size) {
    __shared__ int cell[64];
    cell[threadIdx.x] = threadIdx.x;
    memory[threadIdx.x] = cell[(threadIdx.x + 32) % 64];  // another warp's cell, with no barrier between
}

extern "C" __global__ void initcheck_fault(int* memory, int size) { memory[0] = memory[1] + 1; }

extern "C" __global__ void synccheck_fault(int* memory, int size) {
    if (threadIdx.x < 7) __syncthreads();
    memory[threadIdx.x] = 1;
}
