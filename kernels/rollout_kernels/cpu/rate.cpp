// How fast the target multiplies at best: what benchmarks measure a product against.

#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int kSums = 10;  // independent ones, as many as a multiply-add takes cycles, times those that begin in a cycle

template <class T>
float multiply(int64_t turns, Word a) {
    Floats sums[kSums] = {};
    const Words b = Words{} + a;
    for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 10
        for (int j = 0; j < kSums; ++j) sums[j] = T::step(sums[j], a, b);
#pragma GCC unroll 10
        for (int j = 0; j < kSums; ++j) hold(sums[j]);  // else the turns would be computed ahead, or left out
    }
    Floats total = {};
#pragma GCC unroll 10
    for (int j = 0; j < kSums; ++j) total += sums[j];
    return sum_of(total);
}

}  // namespace

// Runs `turns` rounds of independent products in every thread; returns how many flops that were.
extern "C" int64_t multiply_in_registers(int64_t turns, int threads, int bf16) {
    std::atomic<float> kept{0.0f};
    parallel(threads, [&] { kept = bf16 ? multiply<Bf16>(turns, 0) : multiply<Fp32>(turns, 0); });
    const int64_t per_word = bf16 ? Bf16::kPerWord : Fp32::kPerWord;
    return 2 * turns * threads * kSums * kLanes * per_word + static_cast<int64_t>(kept);
}
