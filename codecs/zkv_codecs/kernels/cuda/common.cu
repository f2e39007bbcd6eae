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

static __device__ u32 lane() {
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

// 2**32 / golden ratio, made odd.
#define GOLDEN 0x9E3779B1u

// The finalizer of MurmurHash3 (Appleby, public domain).
static __device__ u32 fmix32(u32 h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return h;
}

// What is encoded: x + e, or x where there is no residual.
static __device__ float given(const float* x, const float* e, i64 i) {
    return e ? x[i] + e[i] : x[i];
}

static __device__ u32 warp_max(u32 value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(ALL, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// The largest magnitude of a span's elements, in all lanes.
static __device__ float absmax_of(const float* x, const float* e, Span span) {
    u32 bits = 0;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const u32 other = magnitude(given(x, e, i));
        bits = other > bits ? other : bits;
    }
    return __uint_as_float(warp_max(bits));
}

// The sum of this warp's lanes below this one; `total` becomes the sum of all.
static __device__ u32 warp_sum_before(u32 value, u32* total) {
    u32 sum = value;
    for (u32 step = 1; step < WARP; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane() >= step) sum += other;
    }
    *total = __shfl_sync(ALL, sum, WARP - 1);
    return sum - value;
}

// The sum of this block's threads below this one; `total` becomes the sum of all. All threads of
// the block have to come.
static __device__ u32 block_sum_before(u32 value, u32* total) {
    __shared__ u32 sums[WARP];
    u32 sum_of_warp, sum_of_all;
    const u32 within = warp_sum_before(value, &sum_of_warp);
    __syncthreads();
    if (lane() == 0) sums[threadIdx.x / WARP] = sum_of_warp;
    __syncthreads();
    const u32 mine = lane() < blockDim.x / WARP ? sums[lane()] : 0;
    const u32 before = warp_sum_before(mine, &sum_of_all);
    *total = sum_of_all;
    return within + __shfl_sync(ALL, before, threadIdx.x / WARP);
}
