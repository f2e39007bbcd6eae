"""What stands in for CUDA on a CPU: its laws, and that it sees what CUDA leaves undefined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import KernelError, Library
from hypothesis import given
from hypothesis import strategies as st

TEXT = r"""
typedef long long i64;

extern "C" __global__ void where(int* threads, int* blocks) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    threads[at] = threadIdx.x;
    blocks[at] = blockIdx.x * 1000 + gridDim.x;
}

// The sum of a block's numbers over a tree in shared memory.
extern "C" __global__ void block_sum(const int* x, int* sums) {
    __shared__ int part[256];
    part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

extern "C" __global__ void no_barrier(const int* x, int* reversed) {
    __shared__ int part[256];
    part[threadIdx.x] = x[threadIdx.x];
    reversed[threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
}

// Lacks a barrier between the reading and the next writing.
extern "C" __global__ void one_barrier(const int* x, int* out) {
    __shared__ int part[8];
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x[threadIdx.x] + round;
        __syncthreads();
        int value = part[threadIdx.x % 8];
        for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
        out[threadIdx.x] += value;
    }
}

extern "C" __global__ void warps(
    const int* x, int* flipped, int* up, int* down, int* first, unsigned* odd, int* any
) {
    const int at = threadIdx.x;
    flipped[at] = __shfl_xor_sync(0xffffffffu, x[at], 5);
    up[at] = __shfl_up_sync(0xffffffffu, x[at], 3);
    down[at] = __shfl_down_sync(0xffffffffu, x[at], 3);
    first[at] = __shfl_sync(0xffffffffu, x[at], 0);
    odd[at] = __ballot_sync(0xffffffffu, x[at] & 1);
    any[at] = __any_sync(0xffffffffu, x[at] > 90) + 2 * __all_sync(0xffffffffu, x[at] > 5);
}

extern "C" __global__ void counted(const int* x, int n, unsigned* histogram, int* largest) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    atomicAdd(histogram + x[at] % 7, 1u);
    atomicMax(largest, x[at]);
}

extern "C" __global__ void tickets(int* drawn) {
    __shared__ int next;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
    drawn[threadIdx.x] = atomicAdd(&next, 1);
}

extern "C" __global__ void some_leave(int* x) {
    if (threadIdx.x < 40) return;
    __syncthreads();
    x[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(int* x) {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}

extern "C" __global__ void absent_lane(int* x) {
    if (threadIdx.x != 3) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

extern "C" __global__ void unnamed_lane(int* x) {
    if (threadIdx.x < 4) x[threadIdx.x] = __shfl_xor_sync(0xfu, 1, 4);
}

extern "C" __global__ void beyond(float* x, int n) {
    if (threadIdx.x == 0) x[n] = 1.0f;
}

extern "C" __global__ void to_input(const float* x) {
    if (threadIdx.x == 0) const_cast<float*>(x)[0] += 1.0f;
}

extern "C" __global__ void numbers(double a, float b, i64 c, int d, unsigned char e, double* out) {
    if (threadIdx.x == 0) out[0] = a + b + c + d + e;
}

extern "C" __global__ void contracted(const float* a, const float* b, const float* c, float* out) {
    const int at = threadIdx.x;
    out[at] = a[at] * b[at] + c[at];
}
"""

orders = st.integers(0, 2**64 - 1)
ints = st.integers(0, 99)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(TEXT, tmp_path_factory.mktemp("shim"))


def zeros(count: int, dtype: Any = np.int32) -> Any:
    return np.zeros(count, dtype)


def test_threads_know_where_they_are(library):
    threads, blocks = zeros(3 * 64), zeros(3 * 64)
    library.launch("where", 3, 64, (threads, blocks))
    assert threads.tolist() == list(range(64)) * 3
    assert blocks.tolist() == [3] * 64 + [1003] * 64 + [2003] * 64


@given(orders, st.integers(0, 2**32 - 1))
def test_barriers_make_a_tree_of_sums_whatever_the_order(library, order, seed):
    library.seed = order
    x = np.random.default_rng(seed).integers(-99, 99, 512).astype(np.int32)
    sums = zeros(2)
    library.launch("block_sum", 2, 256, (x, sums))
    assert sums.tolist() == [x[:256].sum(), x[256:].sum()]


@pytest.mark.parametrize("name", ["no_barrier", "one_barrier"])
def test_a_missing_barrier_is_seen_in_the_bits(library, name):
    x = np.arange(1, 257, dtype=np.int32)
    results = set()
    for library.seed in range(5):
        out = zeros(256)
        library.launch(name, 1, 256, (x, out))
        results.add(out.tobytes())
    assert len(results) > 1


@given(orders, st.lists(ints, min_size=64, max_size=64))
def test_lanes_of_a_warp_exchange_values(library, order, drawn):
    library.seed = order
    x = np.array(drawn, np.int32)
    out = [zeros(64) for _ in range(4)] + [zeros(64, np.uint32), zeros(64)]
    library.launch("warps", 1, 64, (x, *out))
    lanes = x.reshape(2, 32)
    at = np.arange(32)
    expected = [
        lanes[:, at ^ 5],
        lanes[:, np.where(at >= 3, at - 3, at)],
        lanes[:, np.where(at < 29, at + 3, at)],
        lanes[:, at * 0],
        np.repeat(((lanes & 1).astype(np.uint64) << at.astype(np.uint64)).sum(axis=1), 32),
        np.repeat((lanes > 90).any(axis=1) + 2 * (lanes > 5).all(axis=1), 32),
    ]
    for got, wanted in zip(out, expected, strict=True):
        assert np.array_equal(got, wanted.reshape(-1))


@given(orders, st.lists(ints, min_size=1, max_size=200))
def test_atomics_count_all(library, order, drawn):
    library.seed = order
    x = np.array(drawn, np.int32)
    histogram, largest = zeros(7, np.uint32), zeros(1)
    library.launch("counted", 7, 32, (x, np.int32(x.size), histogram, largest))
    assert np.array_equal(histogram, np.bincount(x % 7, minlength=7))
    assert largest[0] == x.max()


def test_who_comes_first_depends_on_the_seed(library):
    seen = set()
    for library.seed in range(4):
        drawn = zeros(96)
        library.launch("tickets", 1, 96, (drawn,))
        assert sorted(drawn) == list(range(96))
        seen.add(tuple(drawn))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_leave", "threads have ended and the others wait"),
        ("two_barriers", "another __syncthreads than others wait at"),
        ("absent_lane", "threads have ended and the others wait"),
        ("unnamed_lane", "a value of a lane that the mask does not name"),
    ],
)
def test_what_cuda_leaves_undefined_is_an_error(library, name, message):
    with pytest.raises(KernelError, match=f"{name}: block 0.*{message}"):
        library.launch(name, 1, 64, (zeros(64),))
    threads = zeros(64)
    library.launch("where", 1, 64, (threads, zeros(64)))
    assert threads.tolist() == list(range(64))


def test_writing_beside_an_array_is_an_error(library):
    with pytest.raises(KernelError, match="beyond wrote beside an array of 5 f4"):
        library.launch("beyond", 1, 32, (zeros(5, np.float32), np.int32(5)))


def test_writing_to_an_input_is_an_error(library):
    with pytest.raises(KernelError, match="to_input wrote to an input"):
        library.launch("to_input", 1, 32, (zeros(5, np.float32),))


@pytest.mark.parametrize("threads", [0, 33, 2048])
def test_only_whole_warps_run(library, threads):
    with pytest.raises(KernelError, match="whole warps"):
        library.launch("tickets", 1, threads, (zeros(1),))


NUMBERS = (np.float64(0.5), np.float32(1), np.int64(2), np.int32(3), np.uint8(4))


def test_numbers_arrive(library):
    out = zeros(1, np.float64)
    library.launch("numbers", 1, 32, (*NUMBERS, out))
    assert out[0] == 10.5
    assert library.parameters("numbers") == ["f8", "f4", "i8", "i4", "u1", "*f8"]


@pytest.mark.parametrize("at", range(5))
def test_a_number_of_another_type_is_an_error(library, at):
    wrong = [*NUMBERS, zeros(1, np.float64)]
    wrong[at] = int(wrong[at])
    with pytest.raises(KernelError, match=f"numbers, argument {at}: "):
        library.launch("numbers", 1, 32, tuple(wrong))


@pytest.mark.parametrize(
    "array",
    [zeros(5), zeros(5, np.float64), zeros(9, np.float32)[::2], zeros((2, 2), np.float32), 5],
    ids=["int", "double", "strided", "two axes", "number"],
)
def test_an_array_of_another_type_is_an_error(library, array):
    with pytest.raises(KernelError, match="beyond, argument 0: not"):
        library.launch("beyond", 1, 32, (array, np.int32(1)))


def test_a_wrong_number_of_arguments_is_an_error(library):
    with pytest.raises(KernelError, match="tickets takes 1 arguments, not 2"):
        library.launch("tickets", 1, 32, (zeros(32), zeros(32)))


def test_a_product_is_rounded_before_it_is_added_to(library):
    chance = np.random.default_rng(0)
    a, b, c = chance.normal(size=(3, 1024)).astype(np.float32)
    out = np.empty(1024, np.float32)
    library.launch("contracted", 1, 1024, (a, b, c, out))
    assert out.tobytes() == (a * b + c).tobytes()
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    assert out.tobytes() != fused.tobytes()


def test_a_text_with_an_error_shows_the_compilers_message(tmp_path):
    with pytest.raises(AssertionError, match=r"error: .*nonsense"):
        Library('extern "C" __global__ void broken(int* x) { nonsense(x); }', tmp_path)
