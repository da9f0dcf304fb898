// The compiled kernels without Python: values against sums in fp64, and a row's bits alone and among others. For targets
// that Python does not run on here; links with the kernels' own sources. Prints a line per check; exit status 0 or 1.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "attention.h"

extern "C" {
void linear(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int, int, int);
void row_rms_norm(const void*, const void*, void*, int64_t, int64_t, float, int, int);
void gated_silu(const void*, const void*, void*, int64_t, int, int);
void draw_tokens(const float*, const double*, int64_t*, int64_t, int64_t, int);
void segment_attention(const Attention*);
void segment_attention_backward(const Attention*);
}

namespace {

bool failed = false;

void check(const char* name, bool bf16, bool good, double error) {
    std::printf("%-28s %-5s %s (error %.1e)\n", name, bf16 ? "bf16" : "fp32", good ? "ok" : "WRONG", error);
    failed |= !good;
}

// A tensor of random numbers in either element type, and what they are.
struct Tensor {
    bool bf16;
    std::vector<float> values;
    std::vector<uint16_t> halves;

    Tensor(bool bf16, size_t size, int seed, double scale = 1.0) : bf16(bf16), values(size), halves(size) {
        std::mt19937 random(seed);
        std::normal_distribution<double> normal;
        for (auto& v : values) v = float(scale * normal(random));
        if (bf16) round();
    }
    void round() {
        for (size_t i = 0; i < values.size(); ++i) {
            uint32_t bits;
            std::memcpy(&bits, &values[i], 4);
            halves[i] = uint16_t(bits >> 16), bits &= 0xffff0000u;
            std::memcpy(&values[i], &bits, 4);
        }
    }
    void* data() { return bf16 ? static_cast<void*>(halves.data()) : values.data(); }
    void* row(size_t at) { return static_cast<char*>(data()) + at * (bf16 ? 2 : 4); }
    double operator[](size_t i) const {
        if (!bf16) return values[i];
        const uint32_t bits = uint32_t{halves[i]} << 16;
        float v;
        std::memcpy(&v, &bits, 4);
        return v;
    }
    size_t size() const { return values.size(); }
};

template <class Given>
void compare(const char* name, bool bf16, const Given& given, const std::vector<double>& right, double limit) {
    double wrong = 0, norm = 0;
    for (size_t i = 0; i < right.size(); ++i) wrong += std::pow(given[i] - right[i], 2), norm += right[i] * right[i];
    const double error = std::sqrt(wrong / norm);
    check(name, bf16, error <= limit, error);
}

double limit(bool bf16) { return bf16 ? 4e-3 : 1e-6; }

bool same(Tensor& a, size_t at, Tensor& b, size_t size) {
    return !std::memcmp(a.row(at), b.data(), size * (a.bf16 ? 2 : 4));
}

void check_linear(bool bf16, int rows, int columns, int depth, bool plain, int threads) {
    Tensor x(bf16, rows * depth, 1), w(bf16, columns * depth, 2), bias(bf16, columns, 3), out(bf16, rows * columns, 4);
    linear(x.data(), w.data(), bias.data(), out.data(), rows, columns, depth, plain, threads, bf16);
    std::vector<double> right(rows * columns);
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) {
            double sum = bias[c];
            for (int k = 0; k < depth; ++k) sum += x[r * depth + k] * w[plain ? k * columns + c : c * depth + k];
            right[r * columns + c] = sum;
        }
    compare(plain ? "plain product" : "linear", bf16, out, right, limit(bf16));
    bool equal = true;
    Tensor alone(bf16, columns, 5);
    for (int r = 0; r < rows; r += 7) {
        linear(x.row(r * depth), w.data(), bias.data(), alone.data(), 1, columns, depth, plain, 1, bf16);
        equal &= same(out, r * columns, alone, columns);
    }
    check("linear, a row alone", bf16, equal, 0);
}

void check_elementwise(bool bf16, int rows, int dim, int threads) {
    Tensor x(bf16, rows * dim, 1), weight(bf16, dim, 2), out(bf16, rows * dim, 3), alone(bf16, dim, 4);
    row_rms_norm(x.data(), weight.data(), out.data(), rows, dim, 1e-6f, threads, bf16);
    std::vector<double> right(rows * dim), gated(rows * dim);
    Tensor gate(bf16, rows * dim, 5, 3.0), activated(bf16, rows * dim, 6);
    gated_silu(gate.data(), x.data(), activated.data(), rows * dim, threads, bf16);
    bool equal = true;
    for (int r = 0; r < rows; ++r) {
        double squares = 0;
        for (int d = 0; d < dim; ++d) squares += std::pow(x[r * dim + d], 2);
        for (int d = 0; d < dim; ++d) {
            const int i = r * dim + d;
            right[i] = x[i] / std::sqrt(squares / dim + 1e-6) * weight[d];
            gated[i] = gate[i] / (1 + std::exp(-gate[i])) * x[i];
        }
        row_rms_norm(x.row(r * dim), weight.data(), alone.data(), 1, dim, 1e-6f, 1, bf16);
        equal &= same(out, r * dim, alone, dim);
        gated_silu(gate.row(r * dim), x.row(r * dim), alone.data(), dim, 1, bf16);
        equal &= same(activated, r * dim, alone, dim);
    }
    compare("rms_norm", bf16, out, right, limit(bf16));
    compare("gated silu", bf16, activated, gated, limit(bf16));
    check("elementwise, a row alone", bf16, equal, 0);
}

void check_draws() {
    const int rows = 64, vocab = 1003;
    Tensor z(false, rows * vocab, 1, 2.0);
    std::vector<double> uniform(rows);
    std::vector<int64_t> tokens(rows);
    for (int r = 0; r < rows; ++r) uniform[r] = (r + 0.5) / rows;
    draw_tokens(z.values.data(), uniform.data(), tokens.data(), rows, vocab, 2);
    double worst = 0;
    for (int r = 0; r < rows; ++r) {
        double total = 0, below = 0, through = 0;
        for (int i = 0; i < vocab; ++i) {
            const double weight = std::exp(z[r * vocab + i]);
            total += weight, below += i < tokens[r] ? weight : 0, through += i <= tokens[r] ? weight : 0;
        }
        worst = std::max({worst, below / total - uniform[r], uniform[r] - through / total});
    }
    check("draws", false, worst < 1e-6, worst);
}

// Causal attention over `size` positions with a prefix span and spans that go on from it, and its gradients.
void check_attention(bool bf16, int64_t size, int64_t dim, int64_t window, bool chained, int64_t threads) {
    const int64_t heads = 4, kv_heads = 2, groups = heads / kv_heads, unit = 4, total = (size + unit - 1) / unit * unit;
    const float scale = 1.0f / std::sqrt(float(dim));
    Tensor q(bf16, size * heads * dim, 1), k(bf16, total * kv_heads * dim, 2), v(bf16, total * kv_heads * dim, 3);
    Tensor out(bf16, size * heads * dim, 4), grad(bf16, size * heads * dim, 5);
    std::vector<float> lse(size * heads), states(size * heads * (dim + kLanes + 1)), delta(size * heads);
    std::vector<float> grad_q(q.size()), grad_k(k.size()), grad_v(v.size());
    std::vector<int64_t> rows, lengths, units;
    std::vector<Span> spans;
    const int64_t whole = chained ? (size - 1) / kSegment : 0;  // segments that the last row attends in a first span
    for (int64_t i = 0; i < size; ++i) rows.push_back(i), lengths.push_back(i + 1);
    for (int64_t u = 0; u < total / unit; ++u) units.push_back(u);
    spans.push_back({0, whole ? size - 1 : size, 0, 0, (size + kSegment - 1) / kSegment, 0});
    if (whole) {
        spans.push_back({size - 1, size, 0, 0, whole, 1});
        spans.push_back({size - 1, size, whole * kSegment / unit, whole, (size + kSegment - 1) / kSegment - whole, 0});
    }
    Attention call{q.data(), k.data(), v.data(), out.data(), lse.data(), states.data(), grad.data(), delta.data(),
                   grad_q.data(), grad_k.data(), grad_v.data(), rows.data(), lengths.data(), units.data(), spans.data(),
                   int64_t(spans.size()), whole ? 2 : 1, heads, kv_heads, dim, unit, total / unit, window, threads, bf16,
                   scale};
    segment_attention(&call);
    std::vector<double> right(out.size()), right_q(q.size()), right_k(k.size()), right_v(v.size());
    for (int64_t i = 0; i < size; ++i)
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t begin = window ? std::max<int64_t>(0, i + 1 - window) : 0, at = (i * heads + h) * dim;
            const int64_t base = h / groups * total * dim;
            std::vector<double> weight(size), slope(size);
            double sum = 0, along = 0;
            for (int64_t p = begin; p <= i; ++p) {
                double score = 0;
                for (int64_t d = 0; d < dim; ++d) score += q[at + d] * k[base + p * dim + d];
                sum += weight[p] = std::exp(score * scale);
            }
            for (int64_t p = begin; p <= i; ++p) {
                weight[p] /= sum;
                for (int64_t d = 0; d < dim; ++d) {
                    right[at + d] += weight[p] * v[base + p * dim + d];
                    slope[p] += grad[at + d] * v[base + p * dim + d];
                    right_v[base + p * dim + d] += weight[p] * grad[at + d];
                }
                along += weight[p] * slope[p];
            }
            delta[i * heads + h] = float(along);
            for (int64_t p = begin; p <= i; ++p)
                for (int64_t d = 0; d < dim; ++d) {
                    const double s = weight[p] * (slope[p] - along) * scale;
                    right_q[at + d] += s * k[base + p * dim + d], right_k[base + p * dim + d] += s * q[at + d];
                }
        }
    compare("attention", bf16, out, right, limit(bf16));
    segment_attention_backward(&call);
    compare("attention, grad of q", bf16, grad_q, right_q, 2 * limit(bf16));
    compare("attention, grad of k", bf16, grad_k, right_k, 2 * limit(bf16));
    compare("attention, grad of v", bf16, grad_v, right_v, 2 * limit(bf16));
    bool equal = true;
    for (int64_t row = 0; row < size; row += 13) {
        Tensor alone(bf16, heads * dim, 6);
        std::vector<float> own_lse(heads);
        int64_t zero = 0, length = row + 1;
        Span span{0, 1, 0, 0, (length + kSegment - 1) / kSegment, 0};
        Attention single = call;
        single.q = q.row(row * heads * dim), single.out = alone.data(), single.lse = own_lse.data();
        single.rows = &zero, single.lengths = &length, single.spans = &span, single.num_spans = single.num_first = 1;
        segment_attention(&single);
        equal &= same(out, row * heads * dim, alone, heads * dim);
    }
    check("attention, a row alone", bf16, equal, 0);
}

}  // namespace

int main() {
    std::printf("%d lanes, bf16 %s\n", kLanes, kBf16Pairs ? "in pairs" : "widened");
    for (bool bf16 : {false, true}) {
        for (int threads : {1, 3}) check_linear(bf16, 45, 83, 600, false, threads);
        check_linear(bf16, 400, 64, 64, false, 2), check_linear(bf16, 13, 130, 36, true, 2);
        check_elementwise(bf16, 37, 100, 2), check_elementwise(bf16, 400, 96, 3);
        check_attention(bf16, 150, 32, 0, false, 2), check_attention(bf16, 150, 64, 70, false, 1);
        check_attention(bf16, 193, 48, 0, true, 3);
    }
    check_draws();
    return failed;
}
