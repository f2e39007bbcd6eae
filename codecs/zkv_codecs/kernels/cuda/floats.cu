// Narrow floats of 16 bits: the functions of numpy_floats, bit for bit.

#define ABSMAX_MIN 1.5e-36f
#define DEVIATION_MIN 0x1p-23f
#define HUGE_MIN 0x1.fdfff6p+127f
#define SHRINK 0x1.fep-1f

static __device__ Format half_format() {
    return {10, 15, 65504.0f};
}

static __device__ u16 half_bits(float x) {
    const u32 code = x == x ? narrowed(x, half_format()) : 0x7e00u;
    return (u16)(code | sign_of(x) << 15);
}

static __device__ float half_value(u16 bits) {
    const u32 code = bits & 0x7fffu, sign = (u32)(bits >> 15) << 31;
    const u32 beyond = 0x7f800000u | code << 13;
    const float value = code < 0x7c00u ? widened(code, half_format()) : __uint_as_float(beyond);
    return __uint_as_float(__float_as_uint(value) | sign);
}

extern "C" __global__ void fp16_encode(const float* x, i64 n, u16* codes) {
    const i64 i = thread_number();
    if (i < n) codes[i] = half_bits(x[i]);
}

extern "C" __global__ void fp16_decode(const u16* codes, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = half_value(codes[i]);
}

extern "C" __global__ void fp16_add(const u16* codes, i64 n, float weight, float* total) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + half_value(codes[i]) * weight;
}

extern "C" __global__ void bf16_encode(const float* x, i64 n, u16* codes) {
    const i64 i = thread_number();
    if (i >= n) return;
    const u32 bits = __float_as_uint(x[i]);
    const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    codes[i] = (u16)(magnitude(x[i]) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

static __device__ float bf16_value(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

extern "C" __global__ void bf16_decode(const u16* codes, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = bf16_value(codes[i]);
}

extern "C" __global__ void bf16_add(const u16* codes, i64 n, float weight, float* total) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + bf16_value(codes[i]) * weight;
}

// A warp has a block to itself; its lanes are the accumulators of the sums.
extern "C" __global__ void sfp16_encode(
    const float* x, i64 n, i64 block, u16* codes, float* scales
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float absmax = absmax_of(x, 0, span);
    const bool alive = absmax >= ABSMAX_MIN;
    const u32 exponent = __float_as_uint(absmax) >> 23;
    // The power of two that brings the largest magnitude to [2, 4), and the one back.
    const float up = alive ? __uint_as_float((255 - exponent) << 23) : 0.0f;
    float down = alive ? __uint_as_float((exponent - 1) << 23) : 0.0f;
    if (absmax > HUGE_MIN) down = down * SHRINK;
    const float count = (float)(span.stop - span.start);
    float sum = 0.0f;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) sum = sum + x[i] * up;
    const float mean = warp_halved(sum) / count;
    sum = 0.0f;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float y = x[i] * up - mean;
        sum = sum + y * y;
    }
    const float root = sqrtf(warp_halved(sum) / count);
    const float deviation = root > DEVIATION_MIN ? root : DEVIATION_MIN;
    const float factor = 1.0f / deviation;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        codes[i] = half_bits((x[i] * up - mean) * factor);
    }
    if (lane() == 0) {
        scales[2 * (span.start / block)] = mean * down;
        scales[2 * (span.start / block) + 1] = deviation * down;
    }
}

// Of the halves of a mean and a deviation.
static __device__ float sfp16_value(u16 bits, const float* pair) {
    const float half = half_value(bits) * (pair[1] * 0.5f) + pair[0] * 0.5f;
    return half + half;
}

extern "C" __global__ void sfp16_decode(
    const u16* codes, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = sfp16_value(codes[i], pair);
    }
}

extern "C" __global__ void sfp16_add(
    const u16* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + sfp16_value(codes[i], pair) * weight;
    }
}
