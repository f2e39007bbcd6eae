// Codes that are rounded by chance: the functions of numpy_random, bit for bit. What is drawn for an
// element depends on its number and the seed alone.

#define NEARLY_LARGEST 3.4e38f
#define DRAW 0x1p-24f
#define EXPONENT_ZERO 18
#define EXPONENT_TOP 145

static __device__ u32 draw_of(i64 i, u32 seed) {
    return fmix32((u32)i * GOLDEN ^ seed) >> 8;
}

// Uniform in [0, 1).
static __device__ float uniform_of(i64 i, u32 seed) {
    return (float)draw_of(i, seed) * DRAW;
}

extern "C" __global__ void draws(u32 seed, i64 n, u32* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = draw_of(i, seed);
}

// The length of a block's vector, divided by `levels`: 0 if it is too small to be sent.
static __device__ float qsgd_scale(const float* x, Span span, i64 block, float levels) {
    const u32 largest = __float_as_uint(absmax_of(x, 0, span));
    if (!(__uint_as_float(largest) >= SCALE_MIN)) return 0.0f;
    // A power of two that brings the largest magnitude into [1, 2), or [2, 4) where there is none.
    const u32 exponent = largest >> 23;
    const u32 p = exponent < 253 ? 254 - exponent : 1;
    const float power = __uint_as_float(p << 23);
    const u32 own = (u32)(block / WARP);
    Halves halves;
    float sum = 0.0f;
    for (u32 k = 0; k < own; k++) {
        const i64 i = span.start + (i64)reversed(k, own) * WARP + lane();
        const float small = i < span.stop ? x[i] * power : 0.0f;
        sum = pushed(&halves, k, small * small);
    }
    const float length = sqrtf(warp_halved(sum));
    const float each = length / levels * __uint_as_float((254 - p) << 23);
    return each < LARGEST ? each : LARGEST;
}

extern "C" __global__ void qsgd_encode(
    const float* x, i64 n, i64 block, float levels, u32 seed, i8* codes, float* scales
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = qsgd_scale(x, span, block, levels);
    if (lane() == 0) scales[span.start / block] = scale;
    const float factor = scale > 0.0f ? 1.0f / scale : 0.0f;
    const float most = NEARLY_LARGEST / (scale > 1.0f ? scale : 1.0f);
    const float below = floorf(most < levels ? most : levels);
    const float top = below > 1.0f ? below : 1.0f;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float scaled = x[i] * factor;
        const float low = floorf(scaled);
        float code = uniform_of(i, seed) < scaled - low ? low + 1.0f : low;
        code = code < -top ? -top : code;
        codes[i] = scale > 0.0f ? (i8)(int)(code > top ? top : code) : 0;
    }
}

extern "C" __global__ void natural_encode(const float* x, i64 n, u32 seed, u8* codes) {
    const i64 i = thread_number();
    if (i >= n) return;
    const u32 exponent = (magnitude(x[i]) + (draw_of(i, seed) >> 1)) >> 23;
    const u32 stopped = exponent < EXPONENT_TOP ? exponent : EXPONENT_TOP;
    const u32 sign = sign_of(x[i]) << 7;
    codes[i] = stopped > EXPONENT_ZERO ? (u8)((stopped - EXPONENT_ZERO) | sign) : 0;
}

static __device__ float natural_of(u32 code) {
    const u32 kept = code & 127;
    return kept ? __uint_as_float((kept + EXPONENT_ZERO) << 23 | code >> 7 << 31) : 0.0f;
}

extern "C" __global__ void natural_decode(const u8* codes, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = natural_of(codes[i]);
}

extern "C" __global__ void natural_add(const u8* codes, i64 n, float weight, float* total) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + natural_of(codes[i]) * weight;
}

static __device__ float ternary_value(u32 code, float scale) {
    return code == 1 ? scale : code == 3 ? -scale : 0.0f;
}

// Rounds by chance, or to what is nearest where there is an `out` for what is left. A lane has a
// byte's four elements, or those that are left; blocks share no byte.
static __device__ void ternary_block(
    const float* x, const float* e, i64 n, i64 block, u32 seed, u8* codes, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float absmax = absmax_of(x, e, span);
    const float scale = absmax >= SCALE_MIN ? absmax : 0.0f;
    if (lane() == 0) scales[span.start / block] = scale;
    for (i64 first = span.start + 4 * lane(); first < span.stop; first += 4 * WARP) {
        u32 byte = 0;
        for (i64 i = first; i < first + 4 && i < span.stop; i++) {
            const float t = given(x, e, i);
            const float bar = (out ? 0.5f : uniform_of(i, seed)) * scale;
            const u32 code = scale > 0.0f ? t > bar ? 1 : t < -bar ? 3 : 0 : 0;
            byte |= code << 2 * (i - first);
            if (out) out[i] = t - ternary_value(code, scale);
        }
        codes[first / 4] = (u8)byte;
    }
}

extern "C" __global__ void ternary_encode(
    const float* x, i64 n, i64 block, u32 seed, u8* codes, float* scales
) {
    ternary_block(x, 0, n, block, seed, codes, scales, 0);
}

extern "C" __global__ void ternary_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    ternary_block(x, e, n, block, 0, codes, scales, out);
}

static __device__ float ternary_of(const u8* codes, i64 i, float scale) {
    return ternary_value(codes[i / 4] >> i % 4 * 2 & 3, scale);
}

extern "C" __global__ void ternary_decode(
    const u8* codes, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = ternary_of(codes, i, scale);
    }
}

extern "C" __global__ void ternary_add(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + ternary_of(codes, i, scale) * weight;
    }
}
