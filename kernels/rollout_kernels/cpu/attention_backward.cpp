// The backward of segment attention: weights are computed again from the stored log-sum-exp.
//
// A kv head is one thread's, which takes its rows in order, so gradients are the same whatever the number of threads.

#include "attention.h"
#include "parallel.h"

namespace {

template <class T>
class BackwardTask {
    using Element = typename T::Element;
    using Factor = typename T::Factor;

  public:
    void begin(const Attention& call) {
        call_ = call, dim_ = call.dim, words_ = call.dim / T::kPerWord;
        const size_t rows = TaskRows::most(call), segment = kSegment;
        row_words_ = static_cast<int>((rows + kLanes * T::kPerWord - 1) / (kLanes * T::kPerWord)) * kLanes;
        padded_ = size_t(row_words_) * T::kPerWord;
        query_.reserve(rows * words_), grad_out_.reserve(rows * words_);
        query_by_row_.reserve(row_words_ * dim_), grad_out_by_row_.reserve(row_words_ * dim_);
        keys_.reserve(segment * words_), values_.reserve(segment * words_);
        keys_by_position_.reserve(segment * words_);
        by_row_.reserve(row_words_ * segment), transposed_.reserve(row_words_ * segment);
        scores_.reserve(rows * segment), grad_weights_.reserve(rows * segment);
        grad_query_.reserve(rows * dim_), grad_segment_.reserve(segment * dim_);
        weights_.reserve(padded_ * segment), grad_scores_.reserve(padded_ * segment);
        zeros_.reserve(dim_), std::fill_n(zeros_.data(), dim_, Element{});
    }

    void run(const Span& span, const TaskRows& rows) {
        start(rows);
        for (int64_t i = rows.first_segment(span); i < rows.end_segment(span); ++i)
            back(rows, Segment(rows, span, i));
        for (int r = 0; r < rows.size(); ++r)
            for (int d = 0; d < dim_; ++d) call_.grad_q[rows.place(r) * dim_ + d] += grad_query_[r * dim_ + d];
    }

  private:
    void start(const TaskRows& rows) {
        const auto* q = static_cast<const Element*>(call_.q);
        const auto* grad_out = static_cast<const Element*>(call_.grad_out);
        for (int r = 0; r < rows.size(); ++r) {
            copy_words<T>(q + rows.place(r) * dim_, words_, &query_[r * words_]);
            copy_words<T>(grad_out + rows.place(r) * dim_, words_, &grad_out_[r * words_]);
        }
        for (int r = 0; r < rows.size(); r += T::kPerWord) {
            const int next = r + T::kPerWord - 1;
            const bool there = next < rows.size();
            const int64_t low = rows.place(r) * dim_, high = there ? rows.place(next) * dim_ : 0;
            for (int d = 0; d < dim_; d += kLanes) {
                const int at = r / T::kPerWord * dim_ + d;
                store(&query_by_row_[at], T::pair(q + low + d, there ? q + high + d : &zeros_[d]));
                store(&grad_out_by_row_[at], T::pair(grad_out + low + d, there ? grad_out + high + d : &zeros_[d]));
            }
        }
        std::fill_n(grad_query_.data(), rows.size() * dim_, 0.0f);
        // rows that are not there weigh nothing
        for (const auto* factor : {&weights_, &grad_scores_})
            std::fill_n(factor->data(), padded_ * kSegment, Factor{});
    }

    void back(const TaskRows& rows, const Segment& segment) {
        const auto *keys = static_cast<const Element*>(call_.keys), *values = static_cast<const Element*>(call_.values);
        segment.by_word<T>(keys, words_, keys_.data());
        segment.by_word<T>(values, words_, values_.data());
        segment.by_position<T>(keys, dim_, keys_by_position_.data());
        const int size = rows.size(), vectors = segment.vectors();
        product<T>(size, vectors, {query_.data(), words_}, {keys_.data(), kSegment}, {scores_.data(), kSegment}, words_,
                   false);
        product<T>(size, vectors, {grad_out_.data(), words_}, {values_.data(), kSegment},
                   {grad_weights_.data(), kSegment}, words_, false);
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
            T::factor(weight, &weights_[at]);
            T::factor(weight * (load<Floats>(&grad_weights_[at]) - call_.delta[place]) * call_.scale, &grad_scores_[at]);
        }
    }

    // total [positions, D] += factor [rows, positions] transposed, times other [words of rows, D]
    void add_to(float* total, const Factor* factor, const Word* other, int size, const Segment& segment) {
        const int words = (size + T::kPerWord - 1) / T::kPerWord, positions = segment.vectors() * kLanes;
        for (int w = 0; w < row_words_; ++w)
            for (int p = 0; p < positions; p += kLanes) {
                const Factor* row = factor + w * T::kPerWord * kSegment + p;
                store(&by_row_[w * kSegment + p], T::factors(row, row + (T::kPerWord - 1) * kSegment));
            }
        for (int w = 0; w < words; w += kLanes) {
            const float* rows[kLanes];
            for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const float*>(&by_row_[(w + i) * kSegment]);
            transpose_rows<Fp32>(rows, positions, &transposed_[w], row_words_);
        }
        product<T>(segment.visible, dim_ / kLanes, {transposed_.data(), row_words_}, {other, dim_},
                   {grad_segment_.data(), dim_}, words, false);
        for (int p = 0; p < segment.visible; ++p)
            for (int d = 0; d < dim_; ++d) total[segment.at[p] + d] += grad_segment_[p * dim_ + d];
    }

    Attention call_;
    int dim_, words_, row_words_;
    size_t padded_;  // rows, as many as whole vectors of words hold
    Buffer<Word> query_, grad_out_, query_by_row_, grad_out_by_row_, keys_, values_, keys_by_position_;
    Buffer<Word> by_row_, transposed_;
    Buffer<float> scores_, grad_weights_, grad_query_, grad_segment_;
    Buffer<Factor> weights_, grad_scores_;
    Buffer<Element> zeros_;
};

template <class T>
void backward(const Attention& call) {
    const int64_t size = TaskRows::query_rows(call);
    share_out<BackwardTask<T>>(call.kv_heads, call.num_threads, call, [&](BackwardTask<T>& task, int64_t head) {
        for (const Span* span = call.spans; span < call.spans + call.num_spans; ++span)
            for (int64_t begin = span->row_begin; begin < span->row_end; begin += size)
                task.run(*span, {call, begin, std::min(begin + size, span->row_end), head});
    });
}

}  // namespace

extern "C" void segment_attention_backward(const Attention* call) {
    if (call->bf16) backward<Bf16>(*call);
    else backward<Fp32>(*call);
}
