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
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) {
            Words held = load<Words>(from + kLanes * j);  // by itself, since a held array would live in memory
            hold(held);
            row[j] = held;
        }
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
        for (; r + kTileRows <= rows && r + kTileRows + 2 != rows; r += kTileRows)  // a last two would be slow
            block_product<T, kTileRows, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
    if constexpr (VECTORS <= kTileVectors && kTileRows > 4)
        for (; r + 4 <= rows; r += 4) block_product<T, 4, VECTORS>(a.at(r, 0), b, c.at(r, 0), words, add);
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

// 16 bytes of each of the rows i, i + 4, ...
inline Words quads(const void* row, [[maybe_unused]] const void* fourth_row_on) {
#ifdef TARGET_AVX2
    const __m128i low = _mm_loadu_si128((const __m128i*)row), high = _mm_loadu_si128((const __m128i*)fourth_row_on);
    return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#else
    return load<Words>(row);
#endif
}

// Four words of each of kLanes rows, vector i holding those of the rows i, i + 4, ... -> vector i holds every row's word i.
inline void transpose_quads(Words* x) {
    const Words low = shuffle<InTurn<0>>(x[0], x[1]), next_low = shuffle<InTurn<0>>(x[2], x[3]);
    const Words high = shuffle<InTurn<2>>(x[0], x[1]), next_high = shuffle<InTurn<2>>(x[2], x[3]);
    x[0] = shuffle<Joined<0>>(low, next_low), x[1] = shuffle<Joined<2>>(low, next_low);
    x[2] = shuffle<Joined<0>>(high, next_high), x[3] = shuffle<Joined<2>>(high, next_high);
}

// kLanes words of each of kLanes rows -> out[word * stride + row].
template <class T>
inline void transpose(const typename T::Element* const* rows, int word, Word* out, int stride) {
    static_assert(T::kPerWord == 1 && (kLanes == 4 || kLanes == 8));
    Words x[4];
    if constexpr (kLanes == 8 && !T::kInWords) {  // bf16 moves in pairs, and is widened afterwards
        for (int i = 0; i < 4; ++i) x[i] = quads(rows[i] + word, rows[(i + 4) % kLanes] + word);
        transpose_quads(x);
        for (int i = 0; i < 4; ++i) {
            store(out + 2 * i * stride, x[i] << 16), store(out + (2 * i + 1) * stride, x[i] & 0xffff0000u);
        }
    } else {
        for (int at = word; at < word + kLanes; at += 4, out += 4 * stride) {
            for (int i = 0; i < 4; ++i)
                if constexpr (T::kInWords) x[i] = quads(rows[i] + at, rows[(i + 4) % kLanes] + at);
                else x[i] = T::words(rows[i] + at);
            transpose_quads(x);
            for (int i = 0; i < 4; ++i) store(out + i * stride, x[i]);
        }
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
