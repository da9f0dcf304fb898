// Vectors of 16 floats, the two element types, and the one matrix product that every kernel here is made of.
//
// Words: 32 bits, which is one fp32 element or two bf16 elements. Products read words and add up in fp32, in an order
// that is the same for every element, so its bits do not depend on what is computed beside it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

using Word = uint32_t;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// Room for elements, on a cache line's edge and not initialised. A thread keeps its buffers from call to call: fresh
// memory of this size would be asked of the system, and given back, every time.
template <class Element>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    Element* data() const { return data_; }
    Element& operator[](size_t i) const { return data_[i]; }

    // Room for `size` elements at least; what was there is lost if it grows.
    void reserve(size_t size) {
        if (size <= size_) return;
        std::free(data_);
        data_ = static_cast<Element*>(std::aligned_alloc(64, (size * sizeof(Element) + 63) / 64 * 64));
        if (!data_) std::abort();
        size_ = size;
    }

  private:
    Element* data_ = nullptr;
    size_t size_ = 0;
};

inline Floats all(float x) { return Floats{} + x; }

// the larger of each pair; b where one is nan
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float max_of(Floats v) {
    for (int step = 8; step; step /= 2) v = larger(v, __builtin_shuffle(v, kLane ^ step));
    return v[0];
}

inline bool any(Ints truth) {
#ifdef __AVX512DQ__
    return _mm512_movepi32_mask((__m512i)truth);
#else
    for (int i = 0; i < kLanes; ++i)
        if (truth[i]) return true;
    return false;
#endif
}

inline float sum_of(Floats v) {
    for (int step = 8; step; step /= 2) v += __builtin_shuffle(v, kLane ^ step);
    return v[0];
}

// 2 ** x within 2e-7 of it, for x <= 127; 0 where x < -125. Coefficients of Cephes' exp2f.
inline Floats exp2(Floats x) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2 ** 23: the sum's low bits hold x rounded to a whole number
    const Floats shifted = x + shift, f = x - (shifted - shift);
    Floats y = all(1.535336188e-4f);
    for (float c : {1.339887440e-3f, 9.618437357e-3f, 5.550332471e-2f, 2.402264791e-1f, 6.931472029e-1f, 1.0f})
        y = y * f + c;
    const Floats power = reinterpret_cast<Floats>((reinterpret_cast<Ints>(shifted) << 23) + (127 << 23));
    return x < -125.0f ? Floats{} : y * power;
}

struct Fp32 {
    using Element = float;
    static constexpr int kPerWord = 1;

    static Floats step(Floats sum, Word a, Words b) {
        float x;
        std::memcpy(&x, &a, sizeof x);
        return sum + x * reinterpret_cast<Floats>(b);
    }
    static Words pair(const Element* row, const Element*) { return load<Words>(row); }
    static Floats widen(const Element* from) { return load<Floats>(from); }
    static void round(Floats v, Element* to) { store(to, v); }
};

struct Bf16 {
    using Element = uint16_t;
    static constexpr int kPerWord = 2;

    // sum + a * b over the elements of a word
    static Floats step(Floats sum, Word a, Words b) {
#ifdef __AVX512BF16__
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
#else
        const Words x = Words{} + a;
        sum += reinterpret_cast<Floats>(x << 16) * reinterpret_cast<Floats>(b << 16);
        return sum + reinterpret_cast<Floats>(x & 0xffff0000u) * reinterpret_cast<Floats>(b & 0xffff0000u);
#endif
    }
    // 16 columns of as many rows as a word has elements, as words
    static Words pair(const Element* low, const Element* high) { return wide(low) | (wide(high) << 16); }
    static Floats widen(const Element* from) { return reinterpret_cast<Floats>(wide(from) << 16); }
    static void round(Floats v, Element* to) {  // to nearest, ties to even
#ifdef __AVX512BF16__
        store(to, _mm512_cvtneps_pbh((__m512)v));
#else
        const Words bits = reinterpret_cast<Words>(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        store(to, __builtin_convertvector(v == v ? rounded : Words{} + 0x7fc0u, Halves));
#endif
    }

  private:
    static Words wide(const Element* from) { return __builtin_convertvector(load<Halves>(from), Words); }
};

// Up to 16 elements, as a vector that zeros fill up.
template <class T>
inline Floats read(const typename T::Element* from, int count) {
    if (count == kLanes) return T::widen(from);
    typename T::Element row[kLanes] = {};
    std::copy_n(from, count, row);
    return T::widen(row);
}

// The first `count` of a vector, rounded.
template <class T>
inline void write(Floats v, typename T::Element* to, int count) {
    if (count == kLanes) return T::round(v, to);
    typename T::Element row[kLanes];
    T::round(v, row);
    std::copy_n(row, count, to);
}

// a [rows, words] and b [words, columns], rows `stride` words apart; c [rows, columns] in floats.
template <class Pointer>
struct Matrix {
    Pointer data;
    int stride;

    Matrix at(int row, int column) const { return {data + row * stride + column, stride}; }
};
using WordMatrix = Matrix<const Word*>;
using FloatMatrix = Matrix<float*>;

template <class T, int ROWS, int VECTORS>
inline void block_product(WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    Floats sum[ROWS][VECTORS] = {};
    for (int w = 0; w < words; ++w) {
        Words row[VECTORS];
        for (int j = 0; j < VECTORS; ++j) row[j] = load<Words>(b.at(w, kLanes * j).data);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; ++j) sum[r][j] = T::step(sum[r][j], *a.at(r, w).data, row[j]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) {
            float* to = c.at(r, kLanes * j).data;
            store(to, add ? load<Floats>(to) + sum[r][j] : sum[r][j]);
        }
}

template <class T, int VECTORS>
inline void panel_product(int rows, WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) block_product<T, 6, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
    for (; r + 2 <= rows; r += 2) block_product<T, 2, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
    if (r < rows) block_product<T, 1, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
}

// c = a b, or c += a b; c has 16 * vectors columns.
template <class T>
void product(int rows, int vectors, WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    int v = 0;
    for (; v + 4 <= vectors; v += 4, b = b.at(0, 4 * kLanes), c = c.at(0, 4 * kLanes))
        panel_product<T, 4>(rows, a, b, c, words, add);
    for (; v < vectors; ++v, b = b.at(0, kLanes), c = c.at(0, kLanes)) panel_product<T, 1>(rows, a, b, c, words, add);
}

// 16 words of each of 16 rows -> out[word * stride + row].
inline void transpose(const Word* const* rows, int word, Word* out, int stride) {
    Words x[kLanes], y[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = load<Words>(rows[i] + word);
#pragma GCC unroll 4
    for (int step = 1; step < kLanes; step *= 2) {
        // lanes with the bit `step` change places with those of the row whose number differs in that bit
        const Ints low = (kLane & step) ? (kLane ^ step) + kLanes : kLane;
        const Ints high = (kLane & step) ? kLane + kLanes : kLane ^ step;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
            y[i] = i & step ? __builtin_shuffle(x[i ^ step], x[i], high) : __builtin_shuffle(x[i], x[i ^ step], low);
        std::copy(y, y + kLanes, x);
    }
    for (int i = 0; i < kLanes; ++i) store(out + i * stride, x[i]);
}

// `words` words of each of 16 rows -> out[word * stride + row].
inline void transpose_rows(const Word* const* rows, int words, Word* out, int stride) {
    int word = 0;
    for (; word + kLanes <= words; word += kLanes) transpose(rows, word, out + word * stride, stride);
    for (; word < words; ++word)
        for (int p = 0; p < kLanes; ++p) out[word * stride + p] = rows[p][word];
}
