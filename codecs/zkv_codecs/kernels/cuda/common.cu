// What all families share; their text is put behind this one.
//
// The subset: functions over flat arrays; one dimension of threads and blocks, whole warps; full-mask
// warp functions, __syncthreads and integer atomics; no dynamic shared memory, no headers.
// tests/codecs/cuda_shim runs the same text on a CPU and knows no more than this.
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

// 1 for negative numbers, -0 among them.
static __device__ u32 sign_of(float x) {
    return __float_as_uint(x) >> 31;
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
template <class T>
static __device__ T warp_sum_before(T value, T* total) {
    T sum = value;
    for (u32 step = 1; step < WARP; step *= 2) {
        const T other = __shfl_up_sync(ALL, sum, step);
        if (lane() >= step) sum += other;
    }
    *total = __shfl_sync(ALL, sum, WARP - 1);
    return sum - value;
}

// The sum of this block's threads below this one; `total` becomes the sum of all. All threads of
// the block have to come.
template <class T>
static __device__ T block_sum_before(T value, T* total) {
    __shared__ T sums[WARP];
    T sum_of_warp, sum_of_all;
    const T within = warp_sum_before(value, &sum_of_warp);
    // What came before has read its sums.
    __syncthreads();
    if (lane() == 0) sums[threadIdx.x / WARP] = sum_of_warp;
    __syncthreads();
    const T mine = lane() < blockDim.x / WARP ? sums[lane()] : 0;
    const T before = warp_sum_before(mine, &sum_of_all);
    *total = sum_of_all;
    return within + __shfl_sync(ALL, before, threadIdx.x / WARP);
}

// One block: each of `count` numbers becomes the sum of those before it, `total` that of all.
template <class T>
static __device__ void sums_before(i64 count, T* numbers, T* total) {
    const i64 own = (count + blockDim.x - 1) / blockDim.x;
    const i64 first = threadIdx.x * own;
    T sum = 0, all;
    for (i64 at = first; at < first + own && at < count; at++) sum += numbers[at];
    sum = block_sum_before(sum, &all);
    for (i64 at = first; at < first + own && at < count; at++) {
        const T here = numbers[at];
        numbers[at] = sum;
        sum += here;
    }
    if (threadIdx.x == 0) *total = all;
}

// The sum of floats of all lanes, in all lanes: the upper half is added to the lower, and so on.
static __device__ float warp_halved(float sum) {
    for (int step = WARP / 2; step > 0; step /= 2) sum = sum + __shfl_xor_sync(ALL, sum, step);
    return sum;
}
