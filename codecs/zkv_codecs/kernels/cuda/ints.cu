// Block integers: the functions of numpy_ints, bit for bit. A warp has a block of elements to
// itself; its 32 lanes take neighbouring elements, so that memory is read in whole lines. Without a
// residual to add, or one to leave, `e` and `out` are null.

#define ABSMAX_MIN 1.5e-36f
#define FINITE 0x1.fffff6p+127f
#define RANGE_MIN 0x1.fep-15f

// How a block's elements become codes, and codes numbers.
struct Scale {
    float factor;
    float scale;
};

static __device__ Scale scale_of(float absmax, float top) {
    Scale made;
    made.factor = 0.0f;
    made.scale = 0.0f;
    if (absmax >= ABSMAX_MIN) {
        made.factor = top / absmax;
        made.scale = (absmax < FINITE ? absmax : FINITE) / top;
    }
    return made;
}

static __device__ int code_of(float x, Scale scale) {
    return scale.scale > 0.0f ? (int)rintf(x * scale.factor) : 0;
}

static __device__ void int8_block(
    const float* x, const float* e, i64 n, i64 block, i8* codes, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const Scale scale = scale_of(absmax_of(x, e, span), 127.0f);
    if (lane() == 0) scales[span.start / block] = scale.scale;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float t = given(x, e, i);
        const int code = code_of(t, scale);
        codes[i] = (i8)code;
        if (out) out[i] = t - (float)code * scale.scale;
    }
}

extern "C" __global__ void int8_encode(
    const float* x, i64 n, i64 block, i8* codes, float* scales
) {
    int8_block(x, 0, n, block, codes, scales, 0);
}

extern "C" __global__ void int8_encode_residual(
    const float* x, const float* e, i64 n, i64 block, i8* codes, float* scales, float* out
) {
    int8_block(x, e, n, block, codes, scales, out);
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

// Blocks are even, so no byte is shared by two: a lane has a byte's two elements, or the last one.
static __device__ void int4_block(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const Scale scale = scale_of(absmax_of(x, e, span), 7.0f);
    if (lane() == 0) scales[span.start / block] = scale.scale;
    for (i64 first = span.start + 2 * lane(); first < span.stop; first += 2 * WARP) {
        int nibbles = 0;
        for (i64 i = first; i < first + 2 && i < span.stop; i++) {
            const float t = given(x, e, i);
            const int code = code_of(t, scale);
            nibbles |= (code + 8) << (i - first) * 4;
            if (out) out[i] = t - (float)code * scale.scale;
        }
        codes[first / 2] = (u8)nibbles;
    }
}

extern "C" __global__ void int4_encode(
    const float* x, i64 n, i64 block, u8* codes, float* scales
) {
    int4_block(x, 0, n, block, codes, scales, 0);
}

extern "C" __global__ void int4_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    int4_block(x, e, n, block, codes, scales, out);
}

static __device__ float nibble_of(const u8* codes, i64 i) {
    return (float)((codes[i / 2] >> i % 2 * 4 & 15) - 8);
}

extern "C" __global__ void int4_decode(
    const u8* codes, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = nibble_of(codes, i) * scale;
    }
}

extern "C" __global__ void int4_add(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + (nibble_of(codes, i) * scale) * weight;
    }
}

static __device__ float larger(float one, float other) {
    return one > other ? one : other;
}

// Levels are the multiples of `step`; code 0 is the level `lower`.
struct Levels {
    float factor;
    float step;
    float lower;
};

static __device__ Levels levels_between(float low, float high) {
    float half = high * 0.5f - low * 0.5f;
    half = larger(half, larger(fabsf(low), fabsf(high)) * RANGE_MIN);
    half = larger(half, ABSMAX_MIN);
    Levels made;
    made.factor = 127.5f / half;
    const float upper = rintf(high * made.factor);
    made.lower = upper - 255.0f;
    const float outermost = larger(
        larger(upper, -larger(rintf(low * made.factor), made.lower)), 1.0f
    );
    const float step = half / 127.5f, most = FINITE / outermost;
    made.step = step < most ? step : most;
    return made;
}

static __device__ void uint8_block(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    float low = given(x, e, span.start), high = low;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float t = given(x, e, i);
        low = t < low ? t : low;
        high = larger(t, high);
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(ALL, low, step);
        low = other < low ? other : low;
        high = larger(__shfl_xor_sync(ALL, high, step), high);
    }
    const Levels levels = levels_between(low, high);
    if (lane() == 0) {
        scales[2 * (span.start / block)] = levels.step;
        scales[2 * (span.start / block) + 1] = levels.lower;
    }
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const float t = given(x, e, i);
        const float code = rintf(t * levels.factor) - levels.lower;
        const u8 kept = code > 0.0f ? (u8)(code < 255.0f ? code : 255.0f) : 0;
        codes[i] = kept;
        if (out) out[i] = t - ((float)kept + levels.lower) * levels.step;
    }
}

extern "C" __global__ void uint8_encode(
    const float* x, i64 n, i64 block, u8* codes, float* scales
) {
    uint8_block(x, 0, n, block, codes, scales, 0);
}

extern "C" __global__ void uint8_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* codes, float* scales, float* out
) {
    uint8_block(x, e, n, block, codes, scales, out);
}

extern "C" __global__ void uint8_decode(
    const u8* codes, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = ((float)codes[i] + pair[1]) * pair[0];
    }
}

extern "C" __global__ void uint8_add(
    const u8* codes, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + (((float)codes[i] + pair[1]) * pair[0]) * weight;
    }
}
