// The one matrix product that every kernel is made of, and the transpositions before it. Sums run in fp32 in an order
// that is the same for every element, so its bits do not depend on what is computed beside it.

#pragma once

#include "vectors.h"

// a [rows, words] and b [words, columns], rows `stride` words apart; c [rows, columns] in floats.
template <class Pointer>
struct Matrix {
    Pointer data;
    int64_t stride;

    Matrix at(int64_t row, int64_t column) const { return {data + row * stride + column, stride}; }
};
using WordMatrix = Matrix<const Word*>;
using FloatMatrix = Matrix<float*>;

template <class T, int ROWS, int VECTORS>
inline void block_product(WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    Floats sum[ROWS][VECTORS] = {};
    const Word* from = b.data;
    for (int w = 0; w < words; ++w, from += b.stride) {
        Words row[VECTORS];
        for (int j = 0; j < VECTORS; ++j) row[j] = load<Words>(from + kLanes * j);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; ++j) sum[r][j] = T::step(sum[r][j], a.data[r * a.stride + w], row[j]);
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
inline void strip_product(int rows, WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    int r = 0;
    if constexpr (VECTORS <= kTileVectors)
        for (; r + kTileRows <= rows; r += kTileRows)
            block_product<T, kTileRows, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
    for (; r + 2 <= rows; r += 2) block_product<T, 2, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
    if (r < rows) block_product<T, 1, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
}

// Goes through the columns in strips of VECTORS vectors as long as there are as many; returns how many vectors are left.
template <class T, int VECTORS>
inline int strips(int rows, int vectors, WordMatrix a, WordMatrix& b, FloatMatrix& c, int words, bool add) {
    for (; vectors >= VECTORS; vectors -= VECTORS) {
        strip_product<T, VECTORS>(rows, a, b, c, words, add);
        b = b.at(0, VECTORS * kLanes), c = c.at(0, VECTORS * kLanes);
    }
    return vectors;
}

// c = a b, or c += a b; c has kLanes * vectors columns.
template <class T>
void product(int rows, int vectors, WordMatrix a, WordMatrix b, FloatMatrix c, int words, bool add) {
    if (kFewRowsVectors > kTileVectors && rows <= 2)
        vectors = strips<T, kFewRowsVectors>(rows, vectors, a, b, c, words, add);
    vectors = strips<T, kTileVectors>(rows, vectors, a, b, c, words, add);
    strips<T, 1>(rows, vectors, a, b, c, words, add);
}

#ifdef TARGET_AVX512
// lanes with the bit STEP change places with those of the vector whose number differs in that bit
template <int STEP>
struct ExchangedLow {
    static constexpr int of(int i) { return i & STEP ? (i ^ STEP) + kLanes : i; }
};
template <int STEP>
struct ExchangedHigh {
    static constexpr int of(int i) { return i & STEP ? i + kLanes : i ^ STEP; }
};

template <int STEP>
inline void exchange(Words* x) {
    Words y[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
        y[i] = i & STEP ? shuffle<ExchangedHigh<STEP>>(x[i ^ STEP], x[i]) : shuffle<ExchangedLow<STEP>>(x[i], x[i ^ STEP]);
    std::copy(y, y + kLanes, x);
}

// kLanes words of each of kLanes rows -> out[word * stride + row].
template <class T>
inline void transpose(const typename T::Element* const* rows, int word, Word* out, int stride) {
    Words x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = T::words(rows[i] + word * T::kPerWord);
    exchange<1>(x), exchange<2>(x), exchange<4>(x), exchange<8>(x);
    for (int i = 0; i < kLanes; ++i) store(out + i * stride, x[i]);
}
#else
// of each four lanes: the first (FIRST = 0) or last (FIRST = 2) two of a and b in turn
template <int FIRST>
struct InTurn {
    static constexpr int of(int i) { return i / 4 * 4 + FIRST + i % 4 / 2 + i % 2 * kLanes; }
};
// of each four lanes: the first or last two of a, then those of b
template <int FIRST>
struct Joined {
    static constexpr int of(int i) { return i / 4 * 4 + FIRST + i % 2 + i % 4 / 2 * kLanes; }
};

// 4 words from `at` on of each of the rows i, i + 4, ...
template <class T>
inline Words quads(const typename T::Element* const* rows, int i, int at) {
#ifdef TARGET_AVX2
    return T::quads(rows[i] + at, rows[i + 4] + at);
#else
    return T::words(rows[i] + at);
#endif
}

// kLanes words of each of kLanes rows -> out[word * stride + row].
template <class T>
inline void transpose(const typename T::Element* const* rows, int word, Word* out, int stride) {
    static_assert(T::kPerWord == 1 && (kLanes == 4 || kLanes == 8));
    for (int end = word + kLanes; word < end; word += 4, out += 4 * stride) {
        const Words a = quads<T>(rows, 0, word), b = quads<T>(rows, 1, word);
        const Words c = quads<T>(rows, 2, word), d = quads<T>(rows, 3, word);
        const Words ab = shuffle<InTurn<0>>(a, b), cd = shuffle<InTurn<0>>(c, d);
        store(out, shuffle<Joined<0>>(ab, cd)), store(out + stride, shuffle<Joined<2>>(ab, cd));
        const Words ba = shuffle<InTurn<2>>(a, b), dc = shuffle<InTurn<2>>(c, d);
        store(out + 2 * stride, shuffle<Joined<0>>(ba, dc)), store(out + 3 * stride, shuffle<Joined<2>>(ba, dc));
    }
}
#endif

// `words` words of each of kLanes rows -> out[word * stride + row].
template <class T>
inline void transpose_rows(const typename T::Element* const* rows, int words, Word* out, int stride) {
    int word = 0;
    for (; word + kLanes <= words; word += kLanes) transpose<T>(rows, word, out + word * stride, stride);
    for (; word < words; ++word)
        for (int p = 0; p < kLanes; ++p) out[word * stride + p] = T::word(rows[p] + word * T::kPerWord);
}
