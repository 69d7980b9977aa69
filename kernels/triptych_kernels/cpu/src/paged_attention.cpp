// Attention over the paged cache: a first, simple kernel.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel.h"
#include "parallel.h"
#include "vec.h"

namespace triptych {
namespace {

struct PagedAttention {
  int64_t dtype;                // of query and out
  int64_t cache_dtype;
  const void* query;            // [num_tokens, num_heads, head_dim], the last axis dense
  int64_t query_stride;         // elements from token to token
  int64_t query_head_stride;
  const void* kv_cache;         // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const int32_t* block_tables;  // [rows, max_blocks]
  int64_t block_table_stride;
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* seq_lens;      // [rows]
  void* out;                    // [num_tokens, num_heads, head_dim], dense
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  double scale;
  int64_t window;               // keys a query sees at most; 0: all
  double soft_cap;              // 0: none
};

template <typename Q, typename T>
void attend(const PagedAttention& args, int64_t rows) {
  const int64_t num_tokens = args.query_starts[rows], size = args.block_size * args.head_dim;
  parallel_for(num_tokens * args.num_heads, [&](int64_t index) {
    const int64_t token = index / args.num_heads, head = index % args.num_heads;
    const int64_t kv_head = head / (args.num_heads / args.num_kv_heads);
    const int64_t row = std::upper_bound(args.query_starts, args.query_starts + rows, token) - args.query_starts - 1;
    const int64_t end = args.seq_lens[row] - (args.query_starts[row + 1] - token) + 1;
    const int64_t begin = args.window ? std::max<int64_t>(end - args.window, 0) : 0;
    const Q* query = static_cast<const Q*>(args.query) + token * args.query_stride + head * args.query_head_stride;
    std::vector<float> scores(end - begin), sums(args.head_dim);
    const auto vector_of = [&](int64_t key, int64_t half) {
      const int64_t block = args.block_tables[row * args.block_table_stride + key / args.block_size];
      return static_cast<const T*>(args.kv_cache) + ((block * 2 + half) * args.num_kv_heads + kv_head) * size +
             key % args.block_size * args.head_dim;
    };
    float maximum = -INFINITY, total = 0.0f;
    for (int64_t key = begin; key < end; ++key) {
      const T* own = vector_of(key, 0);
      float score = 0.0f;
      for (int64_t d = 0; d < args.head_dim; ++d) score += to_float(query[d]) * to_float(own[d]);
      score *= args.scale;
      if (args.soft_cap > 0.0) score = args.soft_cap * std::tanh(score / args.soft_cap);
      scores[key - begin] = score;
      maximum = std::max(maximum, score);
    }
    for (int64_t key = begin; key < end; ++key) {
      const float weight = std::exp(scores[key - begin] - maximum);
      const T* own = vector_of(key, 1);
      total += weight;
      for (int64_t d = 0; d < args.head_dim; ++d) sums[d] += weight * to_float(own[d]);
    }
    Q* out = static_cast<Q*>(args.out) + index * args.head_dim;
    for (int64_t d = 0; d < args.head_dim; ++d) store_one(out + d, sums[d] / total);
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(paged_attention, triptych::PagedAttention) {
  using namespace triptych;
  if (args.dtype == kFloat32) {
    return args.cache_dtype == kFloat32 ? attend<float, float>(args, rows) : attend<float, bf16>(args, rows);
  }
  args.cache_dtype == kFloat32 ? attend<bf16, float>(args, rows) : attend<bf16, bf16>(args, rows);
}
