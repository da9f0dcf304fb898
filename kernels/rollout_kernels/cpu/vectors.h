// Vectors of the target's own width, and the two element types.
//
// Words: the 32 bits that products are made of, each one fp32 number, or a pair of bf16 where the target multiplies
// those. Where it does not, bf16 is widened to fp32 on its way into a product.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "target.h"

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

using Word = uint32_t;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

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

// Nothing, but the compiler has to have v in a register here: computed, and not read again from where it came from.
template <class V>
inline void hold(V& v) {
    asm volatile("" : "+" TARGET_REGISTER(v));
}

inline Floats all(float x) { return x - Floats{}; }  // x - 0 is x, also for -0, so that nothing is computed

// a * b + c, rounded once where the target can. Compilers do not fuse by themselves here (-ffp-contract=off), since they
// do it in one loop and not in the next, and a row's bits would tell how many rows there were.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(TARGET_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TARGET_AVX2)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

template <class At, class V, int... I>
inline V shuffled(V a, V b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, At::of(I)...);
#else
    return __builtin_shuffle(a, b, Ints{At::of(I)...});
#endif
}

// Lane i is lane At::of(i) of a and b laid end to end.
template <class At, class V>
inline V shuffle(V a, V b) {
    return shuffled<At>(a, b, std::make_integer_sequence<int, kLanes>{});
}

template <int STEP>
struct Swapped {  // lanes whose numbers differ in the bit STEP change places
    static constexpr int of(int i) { return i ^ STEP; }
};

// the larger of each pair; b where one is nan
inline Floats larger(Floats a, Floats b) {
#if defined(TARGET_AVX512)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TARGET_AVX2)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

template <int STEP = kLanes / 2>
inline float max_of(Floats v) {
    v = larger(v, shuffle<Swapped<STEP>>(v, v));
    if constexpr (STEP > 1) return max_of<STEP / 2>(v);
    else return v[0];
}

template <int STEP = kLanes / 2>
inline float sum_of(Floats v) {
    v += shuffle<Swapped<STEP>>(v, v);
    if constexpr (STEP > 1) return sum_of<STEP / 2>(v);
    else return v[0];
}

inline bool any(Ints truth) {
#if defined(TARGET_AVX512)
    return _mm512_movepi32_mask((__m512i)truth);
#elif defined(TARGET_AVX2)
    return _mm256_movemask_ps((__m256)truth);
#else
    int found = 0;
    for (int i = 0; i < kLanes; ++i) found |= truth[i];
    return found;
#endif
}

// 0, 1, 2, ...
inline Ints lane_numbers() {
    Ints numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = i;
    return numbers;
}

// 2 ** x within 2e-7 of it, for x <= 127; 0 where x < -125. Coefficients of Cephes' exp2f.
inline Floats exp2(Floats x) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2 ** 23: the sum's low bits hold x rounded to a whole number
    const Floats shifted = x + shift, f = x - (shifted - shift);
    Floats y = all(1.535336188e-4f);
    for (float c : {1.339887440e-3f, 9.618437357e-3f, 5.550332471e-2f, 2.402264791e-1f, 6.931472029e-1f, 1.0f})
        y = multiply_add(y, f, all(c));
    // as unsigned numbers, since the low bits of what lies far below -125 may run over
    const Floats power = reinterpret_cast<Floats>((reinterpret_cast<Words>(shifted) << 23) + (127u << 23));
    return x < all(-125.0f) ? Floats{} : y * power;
}

// Products of fp32 numbers: a word is one, and what a kernel multiplies by is kept in fp32.
struct WideProducts {
    using Factor = float;
    static constexpr int kPerWord = 1;

    static Floats step(Floats sum, Word a, Words b) {
        float x;
        std::memcpy(&x, &a, sizeof x);
        return multiply_add(all(x), reinterpret_cast<Floats>(b), sum);
    }
    static void factor(Floats v, Factor* to) { store(to, v); }
    static Words factors(const Factor* row, const Factor*) { return load<Words>(row); }
};

struct Fp32 : WideProducts {
    using Element = float;
    static constexpr bool kInWords = true;  // whether rows of elements are words as they lie

    static Words words(const Element* from) { return load<Words>(from); }
    static Words pair(const Element* row, const Element*) { return load<Words>(row); }
    static Word word(const Element* from) { return load<Word>(from); }
    static Floats widen(const Element* from) { return load<Floats>(from); }
    static void round(Floats v, Element* to) { store(to, v); }
};

struct Bf16Elements {
    using Element = uint16_t;

    static Floats widen(const Element* from) { return reinterpret_cast<Floats>(wide(from) << 16); }
    static void round(Floats v, Element* to) {  // to nearest, ties to even
#ifdef TARGET_BF16_PAIRS
        store(to, _mm512_cvtneps_pbh((__m512)v));
#else
        const Words bits = reinterpret_cast<Words>(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        store(to, __builtin_convertvector(v == v ? rounded : Words{} + 0x7fc0u, Halves));
#endif
    }
    static Words wide(const Element* from) { return __builtin_convertvector(load<Halves>(from), Words); }
};

#ifdef TARGET_BF16_PAIRS
struct Bf16 : Bf16Elements {
    using Factor = Element;
    static constexpr int kPerWord = 2;
    static constexpr bool kInWords = true;

    static Floats step(Floats sum, Word a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
    static void factor(Floats v, Factor* to) { round(v, to); }
    static Words factors(const Factor* low, const Factor* high) { return pair(low, high); }
    static Words words(const Element* from) { return load<Words>(from); }
    static Word word(const Element* from) { return load<Word>(from); }
    // kLanes columns of two rows, as words
    static Words pair(const Element* low, const Element* high) { return wide(low) | (wide(high) << 16); }
};
#else
struct Bf16 : Bf16Elements, WideProducts {
    static constexpr bool kInWords = false;

    static Words words(const Element* from) { return wide(from) << 16; }
    static Words pair(const Element* row, const Element*) { return words(row); }
    static Word word(const Element* from) { return Word{*from} << 16; }
};
#endif

// Up to kLanes elements, as a vector that zeros fill up.
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

// `count` words of elements.
template <class T>
inline void copy_words(const typename T::Element* from, int count, Word* to) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, T::words(from + i * T::kPerWord));
    for (; i < count; ++i) to[i] = T::word(from + i * T::kPerWord);
}
