// Segment attention: what attention.py computes in torch operations, in one pass over the KV.
//
// A task goes through its KV segments in order with a running reference, sums of weights and weighted sum of values per
// row, so that a row's bits depend on its own query and KV only: a segment that a row does not see leaves its state as
// it was, and a row's sums run in one order, whatever else is in the task. Rows that attend a prefix together and then
// go on apart keep their state in between.

#include "attention.h"
#include "parallel.h"

#include <cmath>

namespace {

constexpr float kSlack = 8.0f;  // in units of ln 2: weights stay below 256

template <class T>
class Task {
    using Element = typename T::Element;

  public:
    void begin(const Attention& call) {
        call_ = call, dim_ = call.dim, words_ = call.dim / T::kPerWord;
        const size_t rows = TaskRows::most(call), segment = kSegment;
        query_.reserve(rows * words_), keys_.reserve(segment * words_), values_.reserve(segment * words_);
        scores_.reserve(rows * segment), weights_.reserve(rows * segment);
        sums_.reserve(rows * dim_), totals_.reserve(rows * kLanes), reference_.reserve(rows);
    }

    void run(const Span& span, const TaskRows& rows) {
        start(rows, span.first_segment > 0);
        const int64_t begin = rows.first_segment(span), end = rows.end_segment(span);
        for (int64_t i = begin; i < end; ++i) {
            const Segment segment(rows, span, i);
            if (i == begin) segment.prefetch<Element>(call_);
            if (i + 1 < end) Segment(rows, span, i + 1).prefetch<Element>(call_);
            attend(rows, segment);
        }
        if (span.goes_on) keep(rows);
        else finish(rows);
    }

  private:
    void start(const TaskRows& rows, bool goes_on) {
        for (int r = 0; r < rows.size(); ++r) {
            const int64_t at = rows.place(r);
            copy_words<T>(static_cast<const Element*>(call_.q) + at * dim_, words_, &query_[r * words_]);
            float *sums = &sums_[r * dim_], *totals = &totals_[r * kLanes];
            if (goes_on) {
                const float* state = call_.states + at * (dim_ + kLanes + 1);
                std::copy_n(state, dim_, sums), std::copy_n(state + dim_, kLanes, totals);
                reference_[r] = state[dim_ + kLanes];
            } else {
                std::fill_n(sums, dim_, 0.0f), std::fill_n(totals, kLanes, 0.0f);
                reference_[r] = -kInfinity;
            }
        }
    }

    void attend(const TaskRows& rows, const Segment& segment) {
        segment.by_word<T>(static_cast<const Element*>(call_.keys), words_, keys_.data());
        segment.by_position<T>(static_cast<const Element*>(call_.values), dim_, values_.data());
        product<T>(rows.size(), segment.vectors(), {query_.data(), words_}, {keys_.data(), kSegment},
                   {scores_.data(), kSegment}, words_, false);
        for (int r = 0; r < rows.size(); ++r) weigh(r, rows.length(r), segment);
        product<T>(rows.size(), dim_ / kLanes, {reinterpret_cast<Word*>(weights_.data()), kSegment / T::kPerWord},
                   {values_.data(), dim_}, {sums_.data(), dim_}, segment.vectors() * kLanes / T::kPerWord, true);
    }

    // A row's scores become weights, relative to a reference that is near the row's maximum so far: only a score that
    // exceeds it by kSlack moves it, to the maximum, so that sums are rarely scaled anew.
    void weigh(int r, int64_t length, const Segment& segment) {
        Floats score[kVectors], top = all(-kInfinity);
        for (int v = 0; v < segment.vectors(); ++v) {
            score[v] = load<Floats>(&scores_[r * kSegment + v * kLanes]) * (call_.scale * kLog2e);
            score[v] = segment.masked(score[v], v, length, call_.window);
            top = larger(score[v], top);
        }
        Floats total = load<Floats>(&totals_[r * kLanes]);
        if (any(top > reference_[r] + kSlack)) {
            const float reference = max_of(top), shrink = exp2(all(reference_[r] - reference))[0];
            total *= shrink;
            for (float* sum = &sums_[r * dim_]; sum < &sums_[(r + 1) * dim_]; sum += kLanes)
                store(sum, load<Floats>(sum) * shrink);
            reference_[r] = reference;
        }
        // of a row that has seen nothing yet
        const float reference = reference_[r] == -kInfinity ? 0.0f : reference_[r];
        for (int v = 0; v < segment.vectors(); ++v) {
            const Floats weight = exp2(score[v] - reference);
            T::factor(weight, &weights_[r * kSegment + v * kLanes]);
            total += weight;
        }
        store(&totals_[r * kLanes], total);
    }

    void keep(const TaskRows& rows) {
        for (int r = 0; r < rows.size(); ++r) {
            float* state = call_.states + rows.place(r) * (dim_ + kLanes + 1);
            std::copy_n(&sums_[r * dim_], dim_, state), std::copy_n(&totals_[r * kLanes], kLanes, state + dim_);
            state[dim_ + kLanes] = reference_[r];
        }
    }

    void finish(const TaskRows& rows) {
        for (int r = 0; r < rows.size(); ++r) {
            const int64_t at = rows.place(r);
            Element* out = static_cast<Element*>(call_.out) + at * dim_;
            const float total = sum_of(load<Floats>(&totals_[r * kLanes])), inverse = 1.0f / total;
            for (int d = 0; d < dim_; d += kLanes) T::round(load<Floats>(&sums_[r * dim_ + d]) * inverse, out + d);
            call_.lse[at] = reference_[r] + std::log2(total);
        }
    }

    Attention call_;
    int dim_, words_;
    Buffer<Word> query_, keys_, values_;
    Buffer<float> scores_, sums_, totals_, reference_;
    Buffer<typename T::Factor> weights_;
};

template <class T>
void forward(const Attention& call) {
    struct Piece {
        const Span* span;
        int64_t begin, end;
    };
    std::vector<Piece> phases[2];  // what begins at segment 0, then what goes on from there
    const int64_t size = TaskRows::query_rows(call);
    for (int64_t i = 0; i < call.num_spans; ++i) {
        const Span* span = call.spans + i;
        for (int64_t begin = span->row_begin; begin < span->row_end; begin += size)
            phases[i >= call.num_first].push_back({span, begin, std::min(begin + size, span->row_end)});
    }
    for (const auto& pieces : phases)
        share_out<Task<T>>(pieces.size() * call.kv_heads, call.num_threads, call, [&](Task<T>& task, int64_t i) {
            const Piece& piece = pieces[i / call.kv_heads];
            task.run(*piece.span, {call, piece.begin, piece.end, i % call.kv_heads});
        });
}

}  // namespace

extern "C" void segment_attention(const Attention* call) {
    if (call->bf16) forward<Bf16>(*call);
    else forward<Fp32>(*call);
}
