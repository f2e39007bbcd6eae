// One and two bits per element: the functions of numpy_signs, bit for bit. Bits of 32 neighbouring
// elements come from one vote of a warp. Without a residual to add, or one to leave, `e` and `out`
// are null.

// --- signs alone ----------------------------------------------------------------------------------

extern "C" __global__ void signs_encode(const float* x, i64 n, u8* bits) {
    const i64 i = thread_number();
    const u32 word = __ballot_sync(ALL, i < n && sign_of(x[i]));
    write_bits(word, i - lane(), n, bits);
}

extern "C" __global__ void signs_decode(const u8* bits, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = bit_of(bits, i) ? -1.0f : 1.0f;
}

extern "C" __global__ void signs_add(const u8* bits, i64 n, float weight, float* total) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + (bit_of(bits, i) ? -weight : weight);
}

extern "C" __global__ void signs_settle(const float* votes, i64 n, float* out) {
    const i64 i = thread_number();
    if (i >= n) return;
    const float sum = votes[i];
    out[i] = sum > 0.0f ? 1.0f : sum < 0.0f ? -1.0f : sum == 0.0f ? 0.0f : sum;
}

// --- means of blocks ------------------------------------------------------------------------------

// Elements that a mean is taken of.
#define EVERY 0
#define NEGATIVE 1
#define REST 2

static __device__ bool chosen(float t, int which) {
    return which == EVERY || (which == NEGATIVE) == (sign_of(t) == 1);
}

// The mean magnitude of a block's chosen elements.
static __device__ float mean_of(const float* x, const float* e, Span span, i64 block, int which) {
    const float down = 0.5f / (float)block;
    const u32 own = (u32)(block / WARP);
    Halves halves;
    float sum = 0.0f;
    u32 count = 0, counts;
    for (u32 k = 0; k < own; k++) {
        const i64 i = span.start + (i64)reversed(k, own) * WARP + lane();
        float term = 0.0f;
        if (i < span.stop) {
            const float t = given(x, e, i);
            if (chosen(t, which)) {
                term = fabsf(t) * down;
                count++;
            }
        }
        sum = pushed(&halves, k, term);
    }
    sum = warp_halved(sum);
    warp_sum_before(count, &counts);
    const float parts = (float)counts * down;
    const float mean = sum / (parts > down ? parts : down);
    const float finite = mean < LARGEST ? mean : LARGEST;
    return finite >= SCALE_MIN ? finite : 0.0f;
}

// Writes a block's signs, and what they leave of it.
static __device__ void write_signs(
    const float* x, const float* e, Span span, float negative, float rest, u8* bits, float* out
) {
    for (i64 first = span.start; first < span.stop; first += WARP) {
        const i64 i = first + lane();
        const float t = i < span.stop ? given(x, e, i) : 0.0f;
        const u32 word = __ballot_sync(ALL, sign_of(t));
        write_bits(word, first, span.stop, bits);
        if (out && i < span.stop) out[i] = t - (sign_of(t) ? negative : rest);
    }
}

static __device__ void onebit_block(
    const float* x, const float* e, i64 n, i64 block, u8* bits, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = mean_of(x, e, span, block, EVERY);
    if (lane() == 0) scales[span.start / block] = scale;
    write_signs(x, e, span, -scale, scale, bits, out);
}

extern "C" __global__ void onebit_encode(
    const float* x, i64 n, i64 block, u8* bits, float* scales
) {
    onebit_block(x, 0, n, block, bits, scales, 0);
}

extern "C" __global__ void onebit_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* bits, float* scales, float* out
) {
    onebit_block(x, e, n, block, bits, scales, out);
}

extern "C" __global__ void onebit_decode(
    const u8* bits, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = bit_of(bits, i) ? -scale : scale;
    }
}

extern "C" __global__ void onebit_add(
    const u8* bits, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float scale = scales[span.start / block];
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + (bit_of(bits, i) ? -scale : scale) * weight;
    }
}

static __device__ void twomeans_block(
    const float* x, const float* e, i64 n, i64 block, u8* bits, float* scales, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float negative = 0.0f - mean_of(x, e, span, block, NEGATIVE);
    const float rest = mean_of(x, e, span, block, REST);
    if (lane() == 0) {
        scales[2 * (span.start / block)] = negative;
        scales[2 * (span.start / block) + 1] = rest;
    }
    write_signs(x, e, span, negative, rest, bits, out);
}

extern "C" __global__ void twomeans_encode(
    const float* x, i64 n, i64 block, u8* bits, float* scales
) {
    twomeans_block(x, 0, n, block, bits, scales, 0);
}

extern "C" __global__ void twomeans_encode_residual(
    const float* x, const float* e, i64 n, i64 block, u8* bits, float* scales, float* out
) {
    twomeans_block(x, e, n, block, bits, scales, out);
}

extern "C" __global__ void twomeans_decode(
    const u8* bits, const float* scales, i64 n, i64 block, float* out
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        out[i] = bit_of(bits, i) ? pair[0] : pair[1];
    }
}

extern "C" __global__ void twomeans_add(
    const u8* bits, const float* scales, i64 n, i64 block, float weight, float* total
) {
    const Span span = span_of_warp(n, block);
    if (span.start >= n) return;
    const float* pair = scales + 2 * (span.start / block);
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        total[i] = total[i] + (bit_of(bits, i) ? pair[0] : pair[1]) * weight;
    }
}

// --- MXNet's thresholds: the first element is in the highest bits of a byte ----------------------

extern "C" __global__ void mx1bit_encode(
    const float* x, const float* e, i64 n, float threshold, u8* bits, float* out
) {
    const i64 i = thread_number();
    const float t = i < n ? x[i] + e[i] : 0.0f;
    const bool above = i < n && t > threshold;
    // The order of the bits is turned within each byte: that of all 32, and then that of the bytes.
    const u32 turned = __brev(__ballot_sync(ALL, above));
    write_bits(__byte_perm(turned, 0, 0x0123), i - lane(), n, bits);
    if (i < n) out[i] = above ? t - 1.0f : t + 1.0f;
}

static __device__ u32 high_bit_of(const u8* bits, i64 i) {
    return bits[i / 8] >> (7 - i % 8) & 1;
}

extern "C" __global__ void mx1bit_decode(const u8* bits, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = high_bit_of(bits, i) ? 1.0f : -1.0f;
}

extern "C" __global__ void mx1bit_add(const u8* bits, i64 n, float weight, float* total) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + (high_bit_of(bits, i) ? weight : -weight);
}

// A thread has a byte's four elements, or those that are left.
extern "C" __global__ void mx2bit_encode(
    const float* x, const float* e, i64 n, float threshold, u8* codes, float* out
) {
    const i64 first = thread_number() * 4;
    if (first >= n) return;
    u32 byte = 0;
    for (i64 i = first; i < first + 4 && i < n; i++) {
        const float t = x[i] + e[i];
        const bool above = t >= threshold, below = t <= -threshold;
        byte |= (above ? 3 : below ? 2 : 0) << (6 - 2 * (i - first));
        out[i] = above ? t - threshold : below ? t + threshold : t;
    }
    codes[first / 4] = (u8)byte;
}

static __device__ float mx2bit_of(const u8* codes, i64 i, float threshold) {
    const u32 code = codes[i / 4] >> (6 - i % 4 * 2) & 3;
    return code == 3 ? threshold : code == 2 ? -threshold : 0.0f;
}

extern "C" __global__ void mx2bit_decode(const u8* codes, i64 n, float threshold, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = mx2bit_of(codes, i, threshold);
}

extern "C" __global__ void mx2bit_add(
    const u8* codes, i64 n, float threshold, float weight, float* total
) {
    const i64 i = thread_number();
    if (i < n) total[i] = total[i] + mx2bit_of(codes, i, threshold) * weight;
}
