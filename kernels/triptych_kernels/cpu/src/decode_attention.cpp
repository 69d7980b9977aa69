// Attention of single queries over the paged cache: each row's one new token against all of its keys.
//
// A row's keys are cut into spans of a fixed length, whatever else is in the step, so a row's result does not
// depend on its batch. Spans are computed independently, each with its own maximum, and combined in order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace triptych {
namespace {

constexpr int kSpan = 256;  // keys; must stay in step with decode_attention.py
constexpr int kMaxHeads = 16;  // query heads of one key head that are computed at a time

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  int64_t group() const { return num_heads / num_kv_heads; }
};

// What one span gives for one query head: the maximum score, the sum of weights, and the weighted values.
struct Partial {
  float maximum, total;
  float values[1];  // [head_dim]
  static int64_t size(int64_t head_dim) { return head_dim + 2; }  // floats
};

// [kSpan] addresses of a span's rows in the cache, for keys (half 0) or values (half 1) of one head.
template <typename T>
void find_rows(const T* kv_cache, const int32_t* block_table, const Shape& shape, int64_t kv_head, int half,
               int64_t begin, int64_t end, const T** rows) {
  const int64_t size = shape.block_size * shape.head_dim;
  for (int64_t key = begin; key < end; ++key) {
    const int64_t block = block_table[key / shape.block_size];
    const T* page = kv_cache + ((block * 2 + half) * shape.num_kv_heads + kv_head) * size;
    rows[key - begin] = page + key % shape.block_size * shape.head_dim;
  }
}

template <typename T>
float dot(const float* query, const T* key, int64_t head_dim) {
  vec total = zero();
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) total = fma(load(query + d), load(key + d), total);
  float result = sum(total);
  for (; d < head_dim; ++d) result += query[d] * to_float(key[d]);
  return result;
}

// scores[head][key] = query[head] . keys[key]
template <int D, typename T>
void score(const float* query, const T* const* keys, int64_t count, int64_t num_heads, int64_t head_dim,
           float (*scores)[kSpan]) {
  int64_t key = 0;
  if constexpr (D > 0) {
    constexpr int kVecs = D / kLanes;
    for (; key + kLanes <= count; key += kLanes) {
      for (int64_t head = 0; head < num_heads; ++head) {
        const float* own = query + head * D;
        vec q[kVecs];
        for (int i = 0; i < kVecs; ++i) q[i] = load(own + i * kLanes);
        vec products[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const T* row = keys[key + lane];
          vec total = q[0] * load(row);
          for (int i = 1; i < kVecs; ++i) total = fma(q[i], load(row + i * kLanes), total);
          products[lane] = total;
        }
        store(scores[head] + key, sums(products));
      }
    }
  }
  for (; key < count; ++key) {
    for (int64_t head = 0; head < num_heads; ++head) {
      scores[head][key] = dot(query + head * head_dim, keys[key], head_dim);
    }
  }
}

// Turns scores into weights e^(score - maximum); returns maximum and sum.
inline std::pair<float, float> weigh(float* scores, int64_t count) {
  float maximum = scores[0];
  for (int64_t key = 1; key < count; ++key) maximum = std::max(maximum, scores[key]);
  vec total = zero();
  int64_t key = 0;
  for (; key + kLanes <= count; key += kLanes) {
    const vec weight = exp_of_negative(load(scores + key) - splat(maximum));
    store(scores + key, weight);
    total = total + weight;
  }
  float sum_of_weights = sum(total);
  for (; key < count; ++key) sum_of_weights += scores[key] = std::exp(scores[key] - maximum);
  return {maximum, sum_of_weights};
}

// out[head] += weights[head][key] * values[key]; `Heads` heads at a time stay in registers.
template <int D, int Heads, typename T>
void mix(const T* const* values, int64_t count, float (*weights)[kSpan], float* const* out) {
  constexpr int kVecs = D / kLanes;
  vec total[Heads][kVecs];
  for (auto& head : total) {
    for (auto& part : head) part = zero();
  }
  for (int64_t key = 0; key < count; ++key) {
    vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) value[i] = load(values[key] + i * kLanes);
    for (int head = 0; head < Heads; ++head) {
      const vec weight = splat(weights[head][key]);
      for (int i = 0; i < kVecs; ++i) total[head][i] = fma(weight, value[i], total[head][i]);
    }
  }
  for (int head = 0; head < Heads; ++head) {
    for (int i = 0; i < kVecs; ++i) store(out[head] + i * kLanes, total[head][i]);
  }
}

template <typename T>
void mix_any(const T* const* values, int64_t count, int64_t head_dim, const float* weights, float* out) {
  std::fill(out, out + head_dim, 0.0f);
  for (int64_t key = 0; key < count; ++key) {
    for (int64_t d = 0; d < head_dim; ++d) out[d] += weights[key] * to_float(values[key][d]);
  }
}

template <int D, typename T>
void mix_all(const T* const* values, int64_t count, int64_t num_heads, int64_t head_dim, float (*weights)[kSpan],
             float* const* out) {
  int64_t head = 0;
  if constexpr (D > 0) {
    constexpr int kAtOnce = D / kLanes <= 4 ? 3 : D / kLanes <= 8 ? 2 : 1;
    for (; head + kAtOnce <= num_heads; head += kAtOnce) mix<D, kAtOnce>(values, count, weights + head, out + head);
    for (; head < num_heads; ++head) mix<D, 1>(values, count, weights + head, out + head);
  }
  for (; head < num_heads; ++head) mix_any(values, count, head_dim, weights[head], out[head]);
}

// One span of one row for the query heads of one key head.
template <int D, typename Q, typename T>
void attend_span(const Q* query, const T* kv_cache, const int32_t* block_table, const Shape& shape, int64_t kv_head,
                 int64_t begin, int64_t end, float scale, float* partials) {
  const T* rows[kSpan];
  float scaled[kMaxHeads * 256];
  alignas(64) float scores[kMaxHeads][kSpan];
  const int64_t head_dim = shape.head_dim, count = end - begin;
  for (int64_t first = 0; first < shape.group(); first += kMaxHeads) {
    const int64_t num_heads = std::min<int64_t>(kMaxHeads, shape.group() - first);
    const Q* own = query + (kv_head * shape.group() + first) * head_dim;
    for (int64_t i = 0; i < num_heads * head_dim; ++i) scaled[i] = to_float(own[i]) * scale;
    find_rows(kv_cache, block_table, shape, kv_head, 0, begin, end, rows);
    score<D>(scaled, rows, count, num_heads, head_dim, scores);
    float* out[kMaxHeads];
    for (int64_t head = 0; head < num_heads; ++head) {
      auto* partial = reinterpret_cast<Partial*>(partials + (first + head) * Partial::size(head_dim));
      const auto [maximum, total] = weigh(scores[head], count);
      partial->maximum = maximum;
      partial->total = total;
      out[head] = partial->values;
    }
    find_rows(kv_cache, block_table, shape, kv_head, 1, begin, end, rows);
    mix_all<D>(rows, count, num_heads, head_dim, scores, out);
  }
}

// The spans of one row and query head, in order.
template <typename Q>
void combine(const float* partials, int64_t stride, int64_t num_spans, int64_t head_dim, Q* out) {
  const auto span = [&](int64_t i) { return reinterpret_cast<const Partial*>(partials + i * stride); };
  float maximum = span(0)->maximum;
  for (int64_t i = 1; i < num_spans; ++i) maximum = std::max(maximum, span(i)->maximum);
  float total = 0.0f;
  for (int64_t i = 0; i < num_spans; ++i) total += span(i)->total * std::exp(span(i)->maximum - maximum);
  for (int64_t d = 0; d < head_dim; ++d) {
    float value = 0.0f;
    for (int64_t i = 0; i < num_spans; ++i) value += span(i)->values[d] * std::exp(span(i)->maximum - maximum);
    store_one(out + d, value / total);
  }
}

template <int D, typename Q, typename T>
void decode_attention(const Q* query, const T* kv_cache, const int32_t* block_tables, const int32_t* rows,
                      const int32_t* tokens, const int32_t* seq_lens, int64_t num_rows, const Shape& shape,
                      float scale, float* scratch, Q* out) {
  std::vector<int64_t> first_span(num_rows + 1, 0);
  std::vector<int32_t> span_row;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t num_spans = (seq_lens[rows[i]] + kSpan - 1) / kSpan;
    first_span[i + 1] = first_span[i] + num_spans;
    span_row.insert(span_row.end(), num_spans, static_cast<int32_t>(i));
  }
  const int64_t token_size = shape.num_heads * shape.head_dim;
  const int64_t head_size = Partial::size(shape.head_dim), span_size = shape.num_heads * head_size;
  const int64_t num_items = first_span[num_rows] * shape.num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t item = 0; item < num_items; ++item) {
    const int64_t span = item / shape.num_kv_heads, kv_head = item % shape.num_kv_heads;
    const int64_t i = span_row[span], row = rows[i];
    const int64_t begin = (span - first_span[i]) * kSpan, end = std::min<int64_t>(begin + kSpan, seq_lens[row]);
    attend_span<D>(query + tokens[i] * token_size, kv_cache, block_tables + row * shape.max_blocks, shape, kv_head,
                   begin, end, scale, scratch + span * span_size + kv_head * shape.group() * head_size);
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      combine(scratch + first_span[i] * span_size + head * head_size, span_size, first_span[i + 1] - first_span[i],
              shape.head_dim, out + tokens[i] * token_size + head * shape.head_dim);
    }
  }
}

template <typename Q, typename T>
void by_head_dim(const Q* query, const T* kv_cache, const int32_t* block_tables, const int32_t* rows,
                 const int32_t* tokens, const int32_t* seq_lens, int64_t num_rows, const Shape& shape, float scale,
                 float* scratch, Q* out) {
  const auto run = [&](auto attend) {
    attend(query, kv_cache, block_tables, rows, tokens, seq_lens, num_rows, shape, scale, scratch, out);
  };
  switch (shape.head_dim) {
    case 64: return run(decode_attention<64, Q, T>);
    case 80: return run(decode_attention<80, Q, T>);
    case 96: return run(decode_attention<96, Q, T>);
    case 128: return run(decode_attention<128, Q, T>);
    case 256: return run(decode_attention<256, Q, T>);
    default: return run(decode_attention<0, Q, T>);
  }
}

}  // namespace
}  // namespace triptych

#define TRIPTYCH_DECODE_ATTENTION(name, Q, T)                                                                        \
  extern "C" void name(const Q* query, const T* kv_cache, const int32_t* block_tables, const int32_t* rows,          \
                       const int32_t* tokens, const int32_t* seq_lens, int64_t num_rows, int64_t num_heads,          \
                       int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t max_blocks, float scale,  \
                       float* scratch, Q* out) {                                                                     \
    const triptych::Shape shape{num_heads, num_kv_heads, head_dim, block_size, max_blocks};                          \
    triptych::by_head_dim(query, kv_cache, block_tables, rows, tokens, seq_lens, num_rows, shape, scale, scratch,    \
                          out);                                                                                      \
  }

TRIPTYCH_DECODE_ATTENTION(triptych_decode_attention_f32_f32, float, float)
TRIPTYCH_DECODE_ATTENTION(triptych_decode_attention_f32_bf16, float, triptych::bf16)
TRIPTYCH_DECODE_ATTENTION(triptych_decode_attention_bf16_f32, triptych::bf16, float)
TRIPTYCH_DECODE_ATTENTION(triptych_decode_attention_bf16_bf16, triptych::bf16, triptych::bf16)
