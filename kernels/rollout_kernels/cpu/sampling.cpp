// One draw per row of scaled logits, by inverse CDF: weights in fp32, their sums in fp64. A row's draw depends on that
// row only.

#include <cmath>

#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int kBlock = 64;  // tokens whose weights are summed before a draw is looked for among them

typedef double Doubles __attribute__((vector_size(8 * kLanes)));

// Weights of up to 64 tokens, relative to the likeliest; returns their sum.
double weigh(const float* z, int count, float maximum, float* weights) {
    Doubles sums = {};
    for (int i = 0; i < count; i += kLanes) {
        const int some = std::min(kLanes, count - i);
        write<Fp32>(exp2((read<Fp32>(z + i, some) - maximum) * kLog2e), weights + i, some);
        sums += __builtin_convertvector(read<Fp32>(weights + i, some), Doubles);
    }
    double sum = 0.0;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    return sum;
}

float largest(const float* z, int64_t size) {
    Floats top = all(-kInfinity);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) top = larger(load<Floats>(z + i), top);
    float maximum = max_of(top);
    for (; i < size; ++i) maximum = std::max(maximum, z[i]);
    return maximum;
}

int64_t draw(const float* z, double uniform, int64_t vocab, Buffer<double>& sums) {
    const float maximum = largest(z, vocab);
    float weights[kBlock];
    const int64_t blocks = (vocab + kBlock - 1) / kBlock;
    sums.reserve(blocks);
    const auto count = [&](int64_t b) { return static_cast<int>(std::min<int64_t>(kBlock, vocab - b * kBlock)); };
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) sums[b] = total += weigh(z + b * kBlock, count(b), maximum, weights);
    // a product that rounds up to the total would point behind the last token
    const double target = std::min(uniform * total, std::nextafter(total, 0.0));
    const int64_t block = std::upper_bound(sums.data(), sums.data() + blocks, target) - sums.data();
    if (block == blocks) return vocab - 1;  // a row of nan, whose log-prob will tell
    double below = block ? sums[block - 1] : 0.0;
    weigh(z + block * kBlock, count(block), maximum, weights);
    int64_t last = 0;
    for (int i = 0; i < count(block); ++i)
        if (weights[i] > 0) {
            last = i;
            if ((below += weights[i]) > target) break;
        }
    return block * kBlock + last;
}

}  // namespace

// z [rows, vocab] fp32, uniform [rows] in [0, 1) -> tokens [rows]
extern "C" void draw_tokens(
    const float* z, const double* uniform, int64_t* tokens, int64_t rows, int64_t vocab, int threads) {
    split(rows, threads, [&](int64_t begin, int64_t end) {
        static thread_local Buffer<double> sums;
        for (int64_t r = begin; r < end; ++r) tokens[r] = draw(z + r * vocab, uniform[r], vocab, sums);
    });
}
