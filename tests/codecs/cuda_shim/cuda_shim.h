// Enough of CUDA to run the kernels' text on a CPU, for tests: put before the text with -include.
//
// Blocks run one after another, the threads of a block as fibres of one system thread, which give
// way only where CUDA's threads wait for each other: at barriers and in warp functions. The order of
// blocks, of warps between two barriers, and of lanes between two such points, is drawn from a seed,
// so a kernel that lacks a barrier, or depends on who comes first, gives other bits under another
// seed. What CUDA leaves
// undefined is an error here: threads that part at a barrier, lanes that are named in a mask and do
// not come, a value of a lane that does not take part.
//
// It tests what kernels compute, not a memory model, and no speed.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__ static
// Blocks run one after another, so all threads of a block share it, and the next block finds the
// last one's values in it, as on a device.
#define __shared__ static

struct ShimDim {
    unsigned x, y, z;
};
static ShimDim threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

const unsigned LANES = 32;
const size_t STACK = 64 * 1024;

// A context starts a fibre on a stack of its own; from then on jumps lead in and out, as they need
// no system call.
struct Fibre {
    ucontext_t context;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(STACK);
    bool started, done;
};

// Threads that wait for each other: those that have come, and how often all have.
struct Meeting {
    unsigned come;
    unsigned mask;
    unsigned where;
    unsigned long long times;
};

static std::vector<Fibre> fibres;
static std::vector<Meeting> warps;
static std::vector<unsigned long long> slots;
static Meeting block;
static jmp_buf scheduler;
static unsigned current, ended, moves;
static char error[200];
static unsigned long long chance;

inline void fail(const char* what) {
    if (!error[0]) {
        std::snprintf(
            error, sizeof error, "block %u, thread %u: %s", blockIdx.x, current, what
        );
    }
    // Back to the scheduler for good: it stops the launch.
    fibres[current].done = true;
    _longjmp(scheduler, 1);
}

inline void give_way() {
    const unsigned self = current;
    if (!_setjmp(fibres[self].place)) _longjmp(scheduler, 1);
}

inline void resume(unsigned at) {
    current = threadIdx.x = at;
    Fibre& fibre = fibres[at];
    if (_setjmp(scheduler)) return;
    if (fibre.started) _longjmp(fibre.place, 1);
    fibre.started = true;
    setcontext(&fibre.context);
}

inline void wait_for(Meeting& meeting, unsigned long long times) {
    while (meeting.times == times) give_way();
}

inline void meet_all(unsigned line) {
    moves++;
    if (block.come && block.where != line) fail("another __syncthreads than others wait at");
    block.where = line;
    if (++block.come == blockDim.x) {
        block.come = 0;
        block.times++;
    } else {
        wait_for(block, block.times);
    }
}

inline void meet_warp(unsigned mask) {
    moves++;
    const unsigned bit = 1u << (threadIdx.x % LANES);
    Meeting& warp = warps[threadIdx.x / LANES];
    if (!(mask & bit)) fail("a lane that its own mask does not name");
    if (warp.come && warp.mask != mask) fail("lanes of one warp with different masks");
    warp.mask = mask;
    warp.come |= bit;
    if (warp.come == mask) {
        warp.come = 0;
        warp.times++;
    } else {
        wait_for(warp, warp.times);
    }
}

inline unsigned long long exchange(unsigned mask, unsigned long long bits, unsigned source) {
    const unsigned first = threadIdx.x / LANES * LANES;
    slots[threadIdx.x] = bits;
    meet_warp(mask);
    if (!(mask >> source & 1)) fail("a value of a lane that the mask does not name");
    const unsigned long long got = slots[first + source];
    meet_warp(mask);
    return got;
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "only these sizes can be shuffled");
    unsigned long long bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange(mask, bits, source);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned below(unsigned count) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance % count;
}

inline void shuffle_order(std::vector<unsigned>& order) {
    for (unsigned at = 0; at < order.size(); at++) order[at] = at;
    for (unsigned at = order.size(); at > 1; at--) std::swap(order[at - 1], order[below(at)]);
}

struct Call {
    void (*run)(void* kernel, void** arguments);
    void* kernel;
    void** arguments;
};
static Call call;

inline void fibre_main() {
    call.run(call.kernel, call.arguments);
    fibres[current].done = true;
    ended++;
    moves++;
    _longjmp(scheduler, 1);
}

inline void start_block(unsigned threads) {
    block = Meeting();
    warps.assign(threads / LANES, Meeting());
    ended = 0;
    for (Fibre& fibre : fibres) {
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        fibre.context.uc_link = nullptr;
        fibre.started = fibre.done = false;
        makecontext(&fibre.context, fibre_main, 0);
    }
}

// A warp runs as far as it can before the next one does: nothing but a barrier keeps it back.
inline unsigned run_warp(unsigned warp, std::vector<unsigned>& lanes) {
    unsigned all = 0;
    do {
        shuffle_order(lanes);
        moves = 0;
        for (unsigned lane : lanes) {
            const unsigned at = warp * LANES + lane;
            if (!fibres[at].done && !error[0]) resume(at);
        }
        all += moves;
    } while (moves && !error[0]);
    return all;
}

inline void run_block(unsigned threads) {
    std::vector<unsigned> order(threads / LANES), lanes(LANES);
    start_block(threads);
    while (ended < threads && !error[0]) {
        unsigned all = 0;
        shuffle_order(order);
        for (unsigned warp : order) all += run_warp(warp, lanes);
        if (!all && !error[0]) {
            std::snprintf(
                error, sizeof error, "block %u: %u threads have ended and the others wait",
                blockIdx.x, ended
            );
        }
    }
}

inline const char* launch(Call made, unsigned grid, unsigned threads, unsigned long long seed) {
    error[0] = 0;
    if (!grid || !threads || threads > 1024 || threads % LANES) {
        return "a grid and whole warps, 1024 threads at most, have to be given";
    }
    call = made;
    chance = seed * 0x9E3779B97F4A7C15ull + 1;
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    threadIdx = blockIdx = {0, 0, 0};
    if (fibres.size() != threads) fibres = std::vector<Fibre>(threads);
    slots.assign(threads, 0);
    std::vector<unsigned> blocks(grid);
    shuffle_order(blocks);
    for (unsigned at : blocks) {
        blockIdx.x = at;
        run_block(threads);
        if (error[0]) return error;
    }
    return nullptr;
}

// --- a kernel's parameters: how to pass them, and what they are, for the caller to check ---------

template <class... P, size_t... I>
void spread(void* kernel, void** arguments, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(P...)>(kernel)(*static_cast<P*>(arguments[I])...);
}

template <class... P>
void run(void* kernel, void** arguments) {
    spread<P...>(kernel, arguments, std::index_sequence_for<P...>());
}

template <class... P>
Call call_of(void (*kernel)(P...), void** arguments) {
    return {run<P...>, reinterpret_cast<void*>(kernel), arguments};
}

// NumPy's code for a type, behind '*' for an array that is written to and '&' for one that is not.
template <class P>
void describe(char*& text) {
    using Element = std::remove_pointer_t<P>;
    using Plain = std::remove_const_t<Element>;
    static_assert(std::is_arithmetic_v<Plain>, "parameters are arrays and numbers");
    if (std::is_pointer_v<P>) *text++ = std::is_const_v<Element> ? '&' : '*';
    *text++ = std::is_floating_point_v<Plain> ? 'f' : std::is_signed_v<Plain> ? 'i' : 'u';
    *text++ = '0' + sizeof(Plain);
    *text++ = ' ';
}

template <class... P>
const char* parameters(void (*)(P...)) {
    static char text[4 * sizeof...(P) + 1];
    char* end = text;
    (describe<P>(end), ...);
    *end = 0;
    return text;
}

}  // namespace shim

// Makes one kernel callable from outside.
#define SHIM_KERNEL(name)                                                                    \
    extern "C" const char* shim_launch_##name(                                               \
        unsigned grid, unsigned threads, unsigned long long seed, void** arguments           \
    ) {                                                                                      \
        return shim::launch(shim::call_of(name, arguments), grid, threads, seed);            \
    }                                                                                        \
    extern "C" const char* shim_parameters_##name() { return shim::parameters(name); }

// --- CUDA's functions -----------------------------------------------------------------------------

#define __syncthreads() shim::meet_all(__LINE__)

static inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::meet_warp(mask); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return shim::shuffle(mask, value, source % shim::LANES);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip) {
    return shim::shuffle(mask, value, (threadIdx.x % shim::LANES) ^ flip);
}

// Lanes that would read beyond the warp keep their own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned self = threadIdx.x % shim::LANES;
    return shim::shuffle(mask, value, by > self ? self : self - by);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    const unsigned self = threadIdx.x % shim::LANES;
    return shim::shuffle(mask, value, self + by >= shim::LANES ? self : self + by);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    shim::slots[threadIdx.x] = predicate != 0;
    shim::meet_warp(mask);
    const unsigned first = threadIdx.x / shim::LANES * shim::LANES;
    unsigned votes = 0;
    for (unsigned at = 0; at < shim::LANES; at++) {
        if (mask >> at & 1) votes |= unsigned(shim::slots[first + at]) << at;
    }
    shim::meet_warp(mask);
    return votes;
}

static inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}

static inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) == mask;
}

template <class T>
T atomicAdd(T* at, T value) {
    static_assert(std::is_integral_v<T>, "sums of floats would depend on who comes first");
    const T old = *at;
    *at = old + value;
    return old;
}

template <class T>
T atomicMax(T* at, T value) {
    const T old = *at;
    if (value > old) *at = value;
    return old;
}

template <class T>
T atomicMin(T* at, T value) {
    const T old = *at;
    if (value < old) *at = value;
    return old;
}

template <class T>
T atomicOr(T* at, T value) {
    const T old = *at;
    *at = old | value;
    return old;
}

template <class To, class From>
static inline To shim_same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static inline unsigned __float_as_uint(float x) { return shim_same_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return shim_same_bits<float>(x); }
static inline int __float_as_int(float x) { return shim_same_bits<int>(x); }
static inline float __int_as_float(int x) { return shim_same_bits<float>(x); }

static inline unsigned __brev(unsigned x) {
    unsigned turned = 0;
    for (int bit = 0; bit < 32; bit++) turned |= (x >> bit & 1) << (31 - bit);
    return turned;
}

// Byte i of the result is that byte of the two words which digit i of `which` names.
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned made = 0;
    for (int at = 0; at < 4; at++) {
        made |= (unsigned)(bytes >> (which >> 4 * at & 7) * 8 & 0xff) << 8 * at;
    }
    return made;
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
