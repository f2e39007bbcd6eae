// Sparsifiers: the functions of numpy_sparse, bit for bit. Magnitudes are compared as their bits.
//
// The k-th largest magnitude is found digit by digit: 11 bits, then 10, then 10. A pass counts the
// elements that begin with the digits found so far by their next digit (select_count), and one block
// picks the digit (select_pick). `state` is then {the magnitude, how many equal to it to take}: all
// above it are taken, and of the equal ones the first. A warp has a chunk of neighbouring elements:
// it counts what is taken (taken_count), one block adds up the counts (taken_scan), and each warp
// writes its elements behind those of the chunks before (taken_write). So positions ascend, and no
// bit depends on who comes first.

#define BINS 2048
#define CHUNK 1024

#define ROUNDS 12

extern "C" __global__ void sum(const float* x, const float* e, i64 n, float* out) {
    const i64 i = thread_number();
    if (i < n) out[i] = x[i] + e[i];
}

extern "C" __global__ void select_start(u32 rank, u32* histogram, u32* state) {
    for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram[bin] = 0;
    if (threadIdx.x == 0) {
        state[0] = 0;
        state[1] = rank;
    }
}

// Of the elements start, start + stride, ...: those that have the digits of `state` under the mask
// `found` are counted by the bits from `shift` on.
extern "C" __global__ void select_count(
    const float* x, i64 n, i64 start, i64 stride, u32 found, u32 shift, const u32* state,
    u32* histogram
) {
    __shared__ u32 bins[BINS];
    for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins[bin] = 0;
    __syncthreads();
    const u32 digits = state[0];
    const i64 step = stride * gridDim.x * blockDim.x;
    for (i64 i = start + thread_number() * stride; i < n; i += step) {
        const u32 bits = magnitude(x[i]);
        if ((bits & found) == digits) atomicAdd(bins + ((bits & ~found) >> shift), 1u);
    }
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        if (bins[bin]) atomicAdd(histogram + bin, bins[bin]);
    }
}

// One block: adds the digit in which the rank falls, counted from the largest one, to the state,
// and leaves the rank among the elements that have it. The histogram is zeros again.
extern "C" __global__ void select_pick(u32 shift, u32* histogram, u32* state) {
    const u32 own = BINS / blockDim.x;
    const u32 top = BINS - 1 - threadIdx.x * own;
    const u32 rank = state[1];
    u32 count = 0, total;
    for (u32 at = 0; at < own; at++) count += histogram[top - at];
    u32 above = block_sum_before(count, &total);
    // Nobody may still read the rank or a bin: the sum has waited for all.
    for (u32 at = 0; at < own; at++) {
        const u32 here = histogram[top - at];
        if (above < rank && rank <= above + here) {
            state[0] |= (top - at) << shift;
            state[1] = rank - above;
        }
        above += here;
        histogram[top - at] = 0;
    }
}

// Turns {the magnitude, ...} into "all that reach it, but no zeros".
extern "C" __global__ void reach_all(u32* state) {
    if (threadIdx.x == 0) {
        state[0] = state[0] ? state[0] - 1 : 0;
        state[1] = 0;
    }
}

extern "C" __global__ void taken_count(
    const float* x, i64 n, const u32* state, u32* above, u32* level
) {
    const Span span = span_of_warp(n, CHUNK);
    if (span.start >= n) return;
    const u32 least = state[0];
    u32 more = 0, equal = 0;
    for (i64 i = span.start + lane(); i < span.stop; i += WARP) {
        const u32 bits = magnitude(x[i]);
        more += bits > least;
        equal += bits == least;
    }
    u32 all_more, all_equal;
    warp_sum_before(more, &all_more);
    warp_sum_before(equal, &all_equal);
    if (lane() == 0) {
        above[span.start / CHUNK] = all_more;
        level[span.start / CHUNK] = all_equal;
    }
}

// One block: both counts become sums over the chunks before; `total` the sums over all.
extern "C" __global__ void taken_scan(i64 chunks, u32* above, u32* level, u32* total) {
    sums_before(chunks, above, total);
    sums_before(chunks, level, total + 1);
}

extern "C" __global__ void taken_write(
    const float* x, i64 n, const u32* state, const u32* above, const u32* level, float* values,
    u32* indices
) {
    const Span span = span_of_warp(n, CHUNK);
    if (span.start >= n) return;
    const u32 least = state[0], equals = state[1];
    const u32 below = (1u << lane()) - 1;
    u32 more = above[span.start / CHUNK], equal = level[span.start / CHUNK];
    for (i64 first = span.start; first < span.stop; first += WARP) {
        const i64 i = first + lane();
        const u32 bits = i < span.stop ? magnitude(x[i]) : 0;
        const u32 mores = __ballot_sync(ALL, i < span.stop && bits > least);
        const u32 levels = __ballot_sync(ALL, i < span.stop && bits == least);
        const u32 levels_before = equal + __popc(levels & below);
        const u32 at = more + __popc(mores & below)
            + (levels_before < equals ? levels_before : equals);
        if (mores >> lane() & 1 || (levels >> lane() & 1 && levels_before < equals)) {
            values[at] = x[i];
            indices[at] = (u32)i;
        }
        more += __popc(mores);
        equal += __popc(levels);
    }
}

extern "C" __global__ void clear(const u32* indices, i64 count, float* out) {
    const i64 i = thread_number();
    if (i < count) out[indices[i]] = 0.0f;
}

extern "C" __global__ void gather(
    const float* x, const u32* indices, i64 count, float factor, float* values
) {
    const i64 i = thread_number();
    if (i < count) values[i] = x[indices[i]] * factor;
}

extern "C" __global__ void take_out(const u32* indices, i64 count, float* values, float* out) {
    const i64 i = thread_number();
    if (i >= count) return;
    values[i] = out[indices[i]];
    out[indices[i]] = 0.0f;
}

extern "C" __global__ void scatter(
    const float* values, const u32* indices, i64 count, float* out
) {
    const i64 i = thread_number();
    if (i < count) out[indices[i]] = values[i];
}

// Positions of one frame are distinct, so no two threads add to one element.
extern "C" __global__ void add(
    const float* values, const u32* indices, i64 count, float weight, float* total
) {
    const i64 i = thread_number();
    if (i < count) total[indices[i]] = total[indices[i]] + values[i] * weight;
}

extern "C" __global__ void add_wide(
    const float* values, const u32* indices, i64 count, double weight, double* total
) {
    const i64 i = thread_number();
    if (i < count) total[indices[i]] = total[indices[i]] + (double)values[i] * weight;
}

static __device__ u32 moved(u32 half, u32 other, u32 extent, u32 key) {
    const u32 hashed = fmix32(other * GOLDEN ^ key);
    const u32 sum = half + (u32)((u64)hashed * extent >> 32);
    return sum >= extent ? sum - extent : sum;
}

// Positions in the order of their numbers, not sorted.
extern "C" __global__ void draw(
    u32 n, u32 rows, u32 columns, const u32* keys, i64 count, u32* indices
) {
    const i64 i = thread_number();
    if (i >= count) return;
    u32 value = (u32)i;
    do {
        u32 row = value / columns, column = value % columns;
        for (int at = 0; at < ROUNDS; at += 2) {
            row = moved(row, column, rows, keys[at]);
            column = moved(column, row, columns, keys[at + 1]);
        }
        value = row * columns + column;
    } while (value >= n);
    indices[i] = value;
}
