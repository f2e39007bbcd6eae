// Sums of blocks by halving, as in numpy_blocks: element j is added to element j + block / 2, and so
// on down to one. A warp has a block to itself. Its lane j has the elements j, j + 32, ...: halving
// stays within a lane until 32 sums are left, and those are halved by shuffles. Within a lane the
// tree of halves is that of neighbours if elements are taken in the order of their reversed numbers,
// so that one sum per level of the tree has to be kept.

#define LEVELS_MAX 7
#define SCALE_MIN 1.5e-36f
#define LARGEST 0x1.fffffep+127f

struct Halves {
    float level[LEVELS_MAX + 1];
};

// The element of a lane that is taken as number k, of `count`, a power of two above 1.
static __device__ u32 reversed(u32 k, u32 count) {
    return __brev(k) >> (__clz(count) + 1);
}

// Adds the term that is taken as number k; the last one returns the sum of all.
static __device__ float pushed(Halves* sums, u32 k, float term) {
    u32 at = 0;
    for (; k >> at & 1; at++) term = sums->level[at] + term;
    sums->level[at] = term;
    return term;
}

// Writes a word of 32 bits, one of each element from `first` on, as bytes; none lies beyond `stop`.
static __device__ void write_bits(u32 word, i64 first, i64 stop, u8* bits) {
    const i64 at = first / 8 + lane();
    if (lane() < WARP / 8 && at * 8 < stop) bits[at] = (u8)(word >> 8 * lane());
}

static __device__ u32 bit_of(const u8* bits, i64 i) {
    return bits[i / 8] >> i % 8 & 1;
}
