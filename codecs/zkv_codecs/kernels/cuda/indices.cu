// Codings of ascending positions: the functions of numpy_indices, bit for bit. What many threads
// write into one word is joined by "or", so no bit depends on who comes first. Sums of widths of
// gaps fit in 32 bits, sums of a peer's gaps do not.

// Gaps that share a width.
#define GAPS 128
// Bytes in which a warp looks for set bits.
#define CHUNK 128

extern "C" __global__ void ascending(const u32* indices, i64 count, u32 n, u32* wrong) {
    const i64 i = thread_number();
    if (i >= count) return;
    const bool right = i + 1 < count ? indices[i] < indices[i + 1] : indices[i] < n;
    if (!right) atomicOr(wrong, 1u);
}

extern "C" __global__ void scan(i64 count, u32* numbers, u32* total) {
    sums_before(count, numbers, total);
}

extern "C" __global__ void scan_wide(i64 count, u64* numbers, u64* total) {
    sums_before(count, numbers, total);
}

// --- offsets in blocks of 65,536 -----------------------------------------------------------------

extern "C" __global__ void u16_split(const u32* indices, i64 count, u32* counts, u16* offsets) {
    const i64 i = thread_number();
    if (i >= count) return;
    atomicAdd(counts + (indices[i] >> 16), 1u);
    offsets[i] = (u16)(indices[i] & 0xffffu);
}

// A warp has a block of positions.
extern "C" __global__ void u16_join(
    const u32* counts, const u32* before, i64 blocks, const u16* offsets, u32* out
) {
    const i64 at = thread_number() / WARP;
    if (at >= blocks) return;
    for (i64 i = lane(); i < counts[at]; i += WARP) {
        out[before[at] + i] = (u32)at << 16 | offsets[before[at] + i];
    }
}

// --- set bits -------------------------------------------------------------------------------------

// The bit of index i, all ascending: of the index alone, or of its upper bits and its number.
static __device__ u32 place_of(const u32* indices, i64 i, u32 low, u32 numbered) {
    return (indices[i] >> low) + (numbered ? (u32)i : 0);
}

// Bytes are zeros before. The thread of a byte's first bit sets all of them.
extern "C" __global__ void bits_set(
    const u32* indices, i64 count, u32 low, u32 numbered, u8* bits
) {
    const i64 first = thread_number();
    if (first >= count) return;
    const u32 byte = place_of(indices, first, low, numbered) / 8;
    if (first && place_of(indices, first - 1, low, numbered) / 8 == byte) return;
    u32 ones = 0;
    for (i64 i = first; i < count; i++) {
        const u32 place = place_of(indices, i, low, numbered);
        if (place / 8 != byte) break;
        ones |= 1u << place % 8;
    }
    bits[byte] = (u8)ones;
}

extern "C" __global__ void bits_count(const u8* bits, i64 size, u32* counts) {
    const Span span = span_of_warp(size, CHUNK);
    if (span.start >= size) return;
    u32 ones = 0, all;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) ones += __popc(bits[i]);
    warp_sum_before(ones, &all);
    if (lane() == 0) counts[span.start / CHUNK] = all;
}

extern "C" __global__ void bits_find(const u8* bits, i64 size, const u32* before, u32* out) {
    const Span span = span_of_warp(size, CHUNK);
    if (span.start >= size) return;
    u32 base = before[span.start / CHUNK];
    for (i64 first = span.start; first < span.stop; first += WARP) {
        const i64 i = first + lane();
        u32 byte = i < span.stop ? bits[i] : 0, all;
        u32 at = base + warp_sum_before((u32)__popc(byte), &all);
        for (; byte; byte &= byte - 1) out[at++] = (u32)(i * 8 + __ffs(byte) - 1);
        base += all;
    }
}

// --- numbers of some bits each -------------------------------------------------------------------

static __device__ void put_bits(u32* words, i64 start, u32 value) {
    const u64 shifted = (u64)value << (start & 31);
    atomicOr(words + (start >> 5), (u32)shifted);
    if (shifted >> 32) atomicOr(words + (start >> 5) + 1, (u32)(shifted >> 32));
}

static __device__ u32 get_bits(const u32* words, i64 start, u32 width) {
    const u64 pair = words[start >> 5] | (u64)words[(start >> 5) + 1] << 32;
    return (u32)(pair >> (start & 31) & (((u64)1 << width) - 1));
}

static __device__ u32 gap_of(const u32* indices, i64 i) {
    return i ? indices[i] - indices[i - 1] - 1 : indices[0];
}

// A warp has a block of gaps.
extern "C" __global__ void gaps_width(const u32* indices, i64 count, u8* widths) {
    const Span span = span_of_warp(count, GAPS);
    if (span.start >= count) return;
    u32 largest = 0;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const u32 gap = gap_of(indices, i);
        largest = gap > largest ? gap : largest;
    }
    largest = warp_max(largest);
    if (lane() == 0) widths[span.start / GAPS] = (u8)(32 - __clz(largest));
}

// The first bit of gap i, where all blocks before have GAPS gaps.
static __device__ i64 gap_start(const u8* widths, const u32* before, i64 i) {
    return (i64)before[i / GAPS] * GAPS + i % GAPS * widths[i / GAPS];
}

// Words are zeros before.
extern "C" __global__ void gaps_pack(
    const u32* indices, i64 count, const u8* widths, const u32* before, u32* words
) {
    const i64 i = thread_number();
    if (i < count) put_bits(words, gap_start(widths, before, i), gap_of(indices, i));
}

// How far a block of gaps leads.
extern "C" __global__ void gaps_sum(
    const u32* words, const u8* widths, const u32* before, i64 count, u64* sums
) {
    const Span span = span_of_warp(count, GAPS);
    if (span.start >= count) return;
    u64 sum = 0, all;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        sum += (u64)get_bits(words, gap_start(widths, before, i), widths[i / GAPS]) + 1;
    }
    warp_sum_before(sum, &all);
    if (lane() == 0) sums[span.start / GAPS] = all;
}

extern "C" __global__ void gaps_find(
    const u32* words, const u8* widths, const u32* before, const u64* sums, i64 count, u32* out
) {
    const Span span = span_of_warp(count, GAPS);
    if (span.start >= count) return;
    u64 base = sums[span.start / GAPS];
    for (i64 first = span.start; first < span.stop; first += WARP) {
        const i64 i = first + lane();
        u64 step = 0, all;
        if (i < span.stop) {
            step = (u64)get_bits(words, gap_start(widths, before, i), widths[i / GAPS]) + 1;
        }
        const u64 below = base + warp_sum_before(step, &all);
        if (i < span.stop) out[i] = (u32)(below + step - 1);
        base += all;
    }
}

// Words are zeros before.
extern "C" __global__ void low_pack(const u32* indices, i64 count, u32 low, u32* words) {
    const i64 i = thread_number();
    if (i < count) put_bits(words, i * low, indices[i] & ((1u << low) - 1));
}

// `out` holds the places of the upper bits.
extern "C" __global__ void low_join(const u32* words, i64 count, u32 low, u32* out) {
    const i64 i = thread_number();
    if (i < count) out[i] = (out[i] - (u32)i) << low | get_bits(words, i * low, low);
}
