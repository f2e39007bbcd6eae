// 8-bit floats with a scale per block: the functions of numpy_fp8, bit for bit. A warp has a block
// of elements. Without a residual to add, or one to leave, `e` and `out` are null.

#define FINITE 0x1.fffff6p+127f
#define NOT_A_NUMBER 0x7fc00000u

static __device__ Format e4m3() {
    return {3, 7, 448.0f};
}

static __device__ Format e5m2() {
    return {2, 15, 57344.0f};
}

static __device__ u8 fp8_bits(float x, Format form) {
    return (u8)(narrowed(x, form) | sign_of(x) << 7);
}

// E4M3 has one code that is no number, E5M2 four times as many, and infinity.
static __device__ float fp8_value(u8 bits, Format form) {
    const u32 code = bits & 127u, sign = (u32)(bits >> 7) << 31;
    const u32 beyond = form.mantissa == 3 ? 127u : 124u;
    if (code > beyond || (code == beyond && form.mantissa == 3)) {
        return __uint_as_float(NOT_A_NUMBER);
    }
    const u32 value = code == beyond ? 0x7f800000u : __float_as_uint(widened(code, form));
    return __uint_as_float(value | sign);
}

static __device__ void fp8_block(
    const float* x, const float* e, i64 n, i64 block, Format form, u8* codes, float* scales,
    float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float absmax = absmax_of(x, e, span);
    const bool alive = absmax >= form.top * 0x1p-126f;
    const float factor = alive ? form.top / absmax : 0.0f;
    const float scale = alive ? (absmax < FINITE ? absmax : FINITE) / form.top : 0.0f;
    if (lane() == 0) scales[span.start / block] = scale;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float t = given(x, e, i);
        const u8 code = fp8_bits(t * factor, form);
        codes[i] = code;
        if (out) out[i] = t - fp8_value(code, form) * scale;
    }
}

static __device__ void fp8_decode_block(
    const u8* codes, const float* scales, i64 n, i64 block, Format form, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = fp8_value(codes[i], form) * scale;
    }
}

static __device__ void fp8_add_block(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, Format form,
    float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + (fp8_value(codes[i], form) * scale) * weight;
    }
}

extern "C" __global__ void fp8_e4m3_encode(
    const float* x, i64 n, i64 block, u8* codes, float* scales
) {
    fp8_block(x, 0, n, block, e4m3(), codes, scales, 0);
}

extern "C" __global__ void fp8_e4m3_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    fp8_block(x, e, n, block, e4m3(), codes, scales, out);
}

extern "C" __global__ void fp8_e4m3_decode(
    const u8* codes, const float* scales, i64 n, i64 block, float* out
) {
    fp8_decode_block(codes, scales, n, block, e4m3(), out);
}

extern "C" __global__ void fp8_e4m3_add(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    fp8_add_block(codes, scales, n, block, weight, e4m3(), total);
}

extern "C" __global__ void fp8_e5m2_encode(
    const float* x, i64 n, i64 block, u8* codes, float* scales
) {
    fp8_block(x, 0, n, block, e5m2(), codes, scales, 0);
}

extern "C" __global__ void fp8_e5m2_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    fp8_block(x, e, n, block, e5m2(), codes, scales, out);
}

extern "C" __global__ void fp8_e5m2_decode(
    const u8* codes, const float* scales, i64 n, i64 block, float* out
) {
    fp8_decode_block(codes, scales, n, block, e5m2(), out);
}

extern "C" __global__ void fp8_e5m2_add(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    fp8_add_block(codes, scales, n, block, weight, e5m2(), total);
}
