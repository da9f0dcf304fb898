// Row norms and gated activations in one pass over memory. An element's bits depend on its row and nothing else: rows
// are cut into vectors from their start, and what is left of a row is computed as a vector filled up with zeros.

#include <cmath>

#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int64_t kAlone = 1 << 15;  // elements that are not worth waking other threads for

// f(offset, count) for each vector of a row of `size` elements; the last may have fewer than kLanes.
template <class F>
inline void each_vector(int64_t size, F f) {
    for (int64_t i = 0; i < size; i += kLanes) f(i, static_cast<int>(std::min<int64_t>(kLanes, size - i)));
}

template <class T>
inline Floats rounded(Floats v) {
    typename T::Element row[kLanes];
    T::round(v, row);
    return T::widen(row);
}

template <class T>
void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t dim, float eps, int threads) {
    using Element = typename T::Element;
    const auto* scale = static_cast<const Element*>(weight);
    const auto norm = [&](const Element* from, Element* to) {
        Floats squares = {};
        each_vector(dim, [&](int64_t i, int count) {
            const Floats v = read<T>(from + i, count);
            squares = multiply_add(v, v, squares);
        });
        const float inverse = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
        each_vector(dim, [&](int64_t i, int count) {
            write<T>(rounded<T>(read<T>(from + i, count) * inverse) * read<T>(scale + i, count), to + i, count);
        });
    };
    split(rows, rows * dim > kAlone ? threads : 1, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * dim; at < end * dim; at += dim)
            norm(static_cast<const Element*>(x) + at, static_cast<Element*>(out) + at);
    });
}

// silu(gate) * up, each factor rounded to the element type
template <class T>
void swiglu(const void* gate, const void* up, void* out, int64_t size, int threads) {
    using Element = typename T::Element;
    constexpr int64_t kRow = 1024;
    split((size + kRow - 1) / kRow, size > kAlone ? threads : 1, [&](int64_t first, int64_t last) {
        const int64_t begin = first * kRow;
        each_vector(std::min(last * kRow, size) - begin, [&](int64_t i, int count) {
            const Floats x = read<T>(static_cast<const Element*>(gate) + begin + i, count);
            const Floats exponent = x * -kLog2e;
            const Floats silu = exponent > all(126.0f) ? x * 0.0f : x / (1.0f + exp2(exponent));
            const Floats factor = read<T>(static_cast<const Element*>(up) + begin + i, count);
            write<T>(rounded<T>(silu) * factor, static_cast<Element*>(out) + begin + i, count);
        });
    });
}

}  // namespace

extern "C" void row_rms_norm(
    const void* x, const void* weight, void* out, int64_t rows, int64_t dim, float eps, int threads, int bf16) {
    if (bf16) rms_norm<Bf16>(x, weight, out, rows, dim, eps, threads);
    else rms_norm<Fp32>(x, weight, out, rows, dim, eps, threads);
}

extern "C" void gated_silu(const void* gate, const void* up, void* out, int64_t size, int threads, int bf16) {
    if (bf16) swiglu<Bf16>(gate, up, out, size, threads);
    else swiglu<Fp32>(gate, up, out, size, threads);
}

// Row i of `keys` and `values` goes to row rows[i] of the pools.
extern "C" void write_rows(
    const void* keys, const void* values, void* key_pool, void* value_pool, const int64_t* rows, int64_t count,
    int64_t bytes) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = i * bytes, to = rows[i] * bytes;
        std::memcpy(static_cast<char*>(key_pool) + to, static_cast<const char*>(keys) + from, bytes);
        std::memcpy(static_cast<char*>(value_pool) + to, static_cast<const char*>(values) + from, bytes);
    }
}
