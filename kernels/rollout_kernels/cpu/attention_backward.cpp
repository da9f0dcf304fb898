// The backward of segment attention: weights are computed again from the stored log-sum-exp.
//
// A kv head is one thread's, which takes its rows in order, so gradients are the same whatever the number of threads.

#include "attention.h"

namespace {

template <class T>
class BackwardTask {
    using Element = typename T::Element;

  public:
    explicit BackwardTask(const Attention& call) : call_(call), dim_(call.dim), words_(call.dim / T::kPerWord) {}

    void run(const Span& span, const TaskRows& rows) {
        start(rows);
        const int64_t end = span.first_segment + span.num_segments;
        for (int64_t i = rows.first_segment(span); i < end && i * kSegment < rows.longest(); ++i)
            back(rows, Segment(rows, span, i));
        for (int r = 0; r < rows.size(); ++r)
            for (int d = 0; d < dim_; ++d) call_.grad_q[rows.place(r) * dim_ + d] += grad_query_[r * dim_ + d];
    }

  private:
    void start(const TaskRows& rows) {
        const auto *q = static_cast<const Element*>(call_.q), *grad_out = static_cast<const Element*>(call_.grad_out);
        for (int r = 0; r < rows.size(); ++r) {
            std::memcpy(&query_[r * words_], q + rows.place(r) * dim_, words_ * sizeof(Word));
            std::memcpy(&grad_out_[r * words_], grad_out + rows.place(r) * dim_, words_ * sizeof(Word));
        }
        const std::vector<Element> zeros(dim_);
        for (int r = 0; r < rows.size(); r += T::kPerWord) {
            const int next = r + T::kPerWord - 1;
            const bool there = next < rows.size();
            const int64_t low = rows.place(r) * dim_, high = there ? rows.place(next) * dim_ : 0;
            for (int d = 0; d < dim_; d += kLanes) {
                const int at = r / T::kPerWord * dim_ + d;
                store(&query_by_row_[at], T::pair(q + low + d, there ? q + high + d : &zeros[d]));
                store(&grad_out_by_row_[at], T::pair(grad_out + low + d, there ? grad_out + high + d : &zeros[d]));
            }
        }
        std::fill_n(grad_query_.data(), rows_ * dim_, 0.0f);
        // rows that are not there weigh nothing
        for (const auto* factor : {&weights_, &grad_scores_}) std::fill_n(factor->data(), padded_ * kSegment, Element{});
    }

    void back(const TaskRows& rows, const Segment& segment) {
        const auto *keys = static_cast<const Element*>(call_.keys), *values = static_cast<const Element*>(call_.values);
        segment.by_word(keys, words_, keys_.data());
        segment.by_word(values, words_, values_.data());
        segment.by_position<T>(keys, dim_, keys_by_position_.data());
        const int size = rows.size(), vectors = segment.vectors();
        product<T>(size, vectors, {query_.data(), words_}, {keys_.data(), kSegment}, {scores_.data(), kSegment}, words_, false);
        product<T>(size, vectors, {grad_out_.data(), words_}, {values_.data(), kSegment}, {grad_weights_.data(), kSegment}, words_, false);
        for (int r = 0; r < size; ++r) weigh(rows, r, segment);
        product<T>(size, dim_ / kLanes, {reinterpret_cast<Word*>(grad_scores_.data()), kSegment / T::kPerWord},
                   {keys_by_position_.data(), dim_}, {grad_query_.data(), dim_}, vectors * kLanes / T::kPerWord, true);
        add_to(call_.grad_keys, grad_scores_.data(), query_by_row_.data(), size, segment);
        add_to(call_.grad_values, weights_.data(), grad_out_by_row_.data(), size, segment);
    }

    void weigh(const TaskRows& rows, int r, const Segment& segment) {
        const int64_t place = rows.place(r);
        for (int v = 0; v < segment.vectors(); ++v) {
            const int at = r * kSegment + v * kLanes;
            const Floats score = load<Floats>(&scores_[at]) * (call_.scale * kLog2e);
            const Floats weight = exp2(segment.masked(score, v, rows.length(r), call_.window) - call_.lse[place]);
            T::round(weight, &weights_[at]);
            T::round(weight * (load<Floats>(&grad_weights_[at]) - call_.delta[place]) * call_.scale, &grad_scores_[at]);
        }
    }

    // total [positions, D] += factor [rows, positions] transposed, times other [words of rows, D]
    void add_to(float* total, const Element* factor, const Word* other, int size, const Segment& segment) {
        const int words = (size + T::kPerWord - 1) / T::kPerWord, positions = segment.vectors() * kLanes;
        for (int w = 0; w < row_words_; ++w)
            for (int p = 0; p < positions; p += kLanes) {
                const Element* row = factor + w * T::kPerWord * kSegment + p;
                store(&by_row_[w * kSegment + p], T::pair(row, row + (T::kPerWord - 1) * kSegment));
            }
        for (int w = 0; w < words; w += kLanes) {
            const Word* rows[kLanes];
            for (int i = 0; i < kLanes; ++i) rows[i] = &by_row_[(w + i) * kSegment];
            transpose_rows(rows, positions, &transposed_[w], row_words_);
        }
        product<T>(segment.visible, dim_ / kLanes, {transposed_.data(), row_words_}, {other, dim_}, {grad_segment_.data(), dim_}, words, false);
        for (int p = 0; p < segment.visible; ++p)
            for (int d = 0; d < dim_; ++d) total[segment.at[p] + d] += grad_segment_[p * dim_ + d];
    }

    const Attention& call_;
    const int dim_, words_;
    const size_t rows_ = TaskRows::most(call_);
    const int row_words_ = static_cast<int>((rows_ + kLanes * T::kPerWord - 1) / (kLanes * T::kPerWord)) * kLanes;
    const size_t padded_ = size_t(row_words_) * T::kPerWord, segment_ = kSegment;
    Buffer<Word> query_{rows_ * words_}, grad_out_{rows_ * words_}, keys_{segment_ * words_}, values_{segment_ * words_};
    Buffer<Word> query_by_row_{padded_ * dim_}, grad_out_by_row_{padded_ * dim_}, keys_by_position_{segment_ * dim_};
    Buffer<Word> by_row_{padded_ * kSegment}, transposed_{padded_ * kSegment};
    Buffer<float> scores_{rows_ * kSegment}, grad_weights_{rows_ * kSegment};
    Buffer<float> grad_query_{rows_ * dim_}, grad_segment_{segment_ * dim_};
    Buffer<Element> weights_{padded_ * kSegment}, grad_scores_{padded_ * kSegment};
};

template <class T>
void backward(const Attention& call) {
    const int64_t size = TaskRows::query_rows(call);
#pragma omp parallel num_threads(call.num_threads)
    {
        BackwardTask<T> task(call);
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < call.kv_heads; ++head)
            for (const Span* span = call.spans; span < call.spans + call.num_spans; ++span)
                for (int64_t begin = span->row_begin; begin < span->row_end; begin += size)
                    task.run(*span, {call, begin, std::min(begin + size, span->row_end), head});
    }
}

}  // namespace

extern "C" void segment_attention_backward(const Attention* call) {
    if (call->bf16) backward<Bf16>(*call);
    else backward<Fp32>(*call);
}
