// Block integers: the functions of numpy_ints, bit for bit. A warp has a block of elements to
// itself; its 32 lanes take neighbouring elements, so that memory is read in whole lines.

// Below this the scale would be a subnormal: see numpy_ints.
#define ABSMAX_MIN 1.5e-36f

static __device__ i8 code_of(float x, float factor) {
    return (i8)(int)rintf(x * factor);
}

extern "C" __global__ void int8_encode(
    const float* x, i64 n, i64 block, i8* codes, float* scales
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    u32 bits = 0;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const u32 other = magnitude(x[i]);
        bits = other > bits ? other : bits;
    }
    const float absmax = __uint_as_float(warp_max(bits));
    const bool alive = absmax >= ABSMAX_MIN;
    const float factor = alive ? 127.0f / absmax : 0.0f;
    if (lane() == 0) scales[span.start / block] = alive ? absmax / 127.0f : 0.0f;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        codes[i] = alive ? code_of(x[i], factor) : 0;
    }
}

extern "C" __global__ void int8_encode_residual(
    const float* x, const float* e, i64 n, i64 block, i8* codes, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    u32 bits = 0;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const u32 other = magnitude(x[i] + e[i]);
        bits = other > bits ? other : bits;
    }
    const float absmax = __uint_as_float(warp_max(bits));
    const bool alive = absmax >= ABSMAX_MIN;
    const float factor = alive ? 127.0f / absmax : 0.0f;
    const float scale = alive ? absmax / 127.0f : 0.0f;
    if (lane() == 0) scales[span.start / block] = scale;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float t = x[i] + e[i];
        const i8 code = alive ? code_of(t, factor) : 0;
        codes[i] = code;
        out[i] = t - (float)code * scale;
    }
}

extern "C" __global__ void int8_decode(
    const i8* codes, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = (float)codes[i] * scale;
    }
}

extern "C" __global__ void int8_add(
    const i8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + ((float)codes[i] * scale) * weight;
    }
}
