// The addresses of a sequence's keys and values, and of the scales of those of 8 bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/plan.h"

namespace triptych::attention {

// The keys and values of one sequence and key head, in pages.
//
// Keys lie as their products need them, one word of all keys of a block after the other: [words][block_size][elements of
// a word], where a word has four bytes. Values are [block_size][head_dim]. Latent vectors, which are both, are such rows,
// too: many queries share a key, so that putting it into words is small beside its products.
template <typename T>
struct Pages {
  const T* first;         // keys of the head in block 0
  const int32_t* blocks;  // of the sequence
  int64_t stride;         // elements from block to block
  int64_t values;         // elements from keys to values
  int64_t block_size;
  int64_t vector_stride;  // elements from vector to vector that are rows

  // f(first key, number of keys, keys of its block, place of the first in them) for each block that [begin, end) touches
  template <typename F>
  void for_pages(int64_t begin, int64_t end, const F& f) const {
    int64_t block = begin / block_size, offset = begin - block * block_size;
    for (int64_t key = begin; key < end; ++block, offset = 0) {
      const int64_t count = std::min(end - key, block_size - offset);
      f(key, count, first + blocks[block] * stride, offset);
      key += count;
    }
  }
};

template <typename T>
Pages<T> pages_of(const PagedAttention& args, const Tile& tile, int64_t kv_head, const void* cache, int64_t size) {
  const int64_t head = args.block_size * size, half = args.num_kv_heads * head;
  return {static_cast<const T*>(cache) + kv_head * head, args.block_tables + tile.sequence * args.block_table_stride,
          args.is_latent ? half : 2 * half, args.is_latent ? 0 : half, args.block_size, size};
}
template <typename T>
Pages<T> pages_of(const PagedAttention& args, const Tile& tile, int64_t kv_head) {
  return pages_of<T>(args, tile, kv_head, args.kv_cache, args.vector_stride);
}
// The pages of a cache with one number for each key and value.
inline Pages<float> scales_of(const PagedAttention& args, const Tile& tile, int64_t kv_head) {
  return pages_of<float>(args, tile, kv_head, args.kv_scales, 1);
}

// Scales of the keys of a span and of their values; none of a cache that has none.
template <typename T>
struct SpanScales {
  SpanScales(const PagedAttention&, const Tile&, int64_t, int64_t, int64_t, int64_t) {}
};

template <>
struct SpanScales<int8_t> {
  float keys[kSpan];
  float values[kSpan];

  // What pads a panel gets 0.
  SpanScales(const PagedAttention& args, const Tile& tile, int64_t kv_head, int64_t begin, int64_t first, int64_t end) {
    const Pages<float> pages = scales_of(args, tile, kv_head);
    const auto fill = [&](int64_t from, int64_t to) {
      std::fill(keys + from, keys + to, 0.0f);
      std::fill(values + from, values + to, 0.0f);
    };
    fill(first / kPanel * kPanel, first);
    pages.for_pages(begin + first, begin + end, [&](int64_t key, int64_t count, const float* page, int64_t offset) {
      const float *from = page + offset, *from_values = from + pages.values;
      int64_t to = key - begin;
      for (; count >= kLanes; count -= kLanes, to += kLanes, from += kLanes, from_values += kLanes) {
        store(keys + to, load(from));
        store(values + to, load(from_values));
      }
      for (; count > 0; --count, ++to) {
        keys[to] = *from++;
        values[to] = *from_values++;
      }
    });
    fill(end, (end + kPanel - 1) / kPanel * kPanel);
  }
};

}  // namespace triptych::attention
