// What all families share; their text is put behind this one.
//
// The subset: plain functions over flat arrays; one dimension of threads and blocks, whole warps;
// full-mask warp functions, __syncthreads and integer atomics; no dynamic shared memory, no
// headers. tests/codecs/cuda_shim runs the same text on a CPU and knows no more than this.
// Compiled with -fmad=false: a product is rounded before it is added to.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef signed char i8;
typedef unsigned char u8;

#define WARP 32
#define ALL 0xffffffffu

// Elements start <= i < stop.
struct Span {
    i64 start;
    i64 stop;
};

static __device__ i64 thread_number() {
    return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ int lane() {
    return threadIdx.x % WARP;
}

// The block of neighbouring elements that this warp works on; beyond the last one it is empty.
static __device__ Span span_of_warp(i64 n, i64 block) {
    Span span;
    span.start = thread_number() / WARP * block;
    span.stop = span.start + block < n ? span.start + block : n;
    return span;
}

// The bits without the sign: they are in the order of the magnitudes.
static __device__ u32 magnitude(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

static __device__ u32 warp_max(u32 value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(ALL, value, step);
        value = other > value ? other : value;
    }
    return value;
}
