// The division of a step of attention among threads.
//
// A tile is some queries of one sequence, with all query heads that share a key head: keys and values are packed once
// for all of them. A tile that would take long is cut into pieces, runs of spans that different threads take.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>

#include "attention/arithmetic.h"
#include "kernel.h"
#include "parallel.h"
#include "stages.h"

namespace triptych::attention {

// A step of attention; rows are its sequences.
struct PagedAttention {
  int64_t dtype;                // of query and out
  int64_t cache_dtype;
  const void* query;            // [num_tokens, num_heads, head_dim], the last axis dense
  int64_t query_stride;         // elements from token to token
  int64_t query_head_stride;
  const void* kv_cache;         // [num_blocks, 2, num_kv_heads, block_size, head_dim]; latent: [num_blocks, block_size,
                                // head_dim], the last axis dense
  int64_t vector_stride;        // latent: elements from vector to vector, of the next block too; else head_dim
  const float* kv_scales;       // [num_blocks, 2, num_kv_heads, block_size] beside int8, else null
  const int32_t* block_tables;  // [rows, max_blocks]
  int64_t block_table_stride;
  const int32_t* query_starts;  // [rows + 1]; null: each row has one token
  const int32_t* seq_lens;      // [rows]
  void* out;                    // [num_tokens, num_heads, value_dim], dense
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;            // elements of a value: latent, the first ones of its key; else head_dim
  int64_t is_latent;            // whether a token has one vector, of one key head, which is key and value
  int64_t block_size;
  double scale;
  int64_t window;               // keys that a query sees at most; 0: all
  int64_t chunk;                // a query sees keys of its own chunk of so many positions; 0: all
  double soft_cap;              // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  const float* sinks;           // [num_heads], a score without a key and a value; null: none
  const float* alibi;           // [num_heads], score per position that the key is after the query; null: none
  const Stages* stages;         // what makes the queries, keys and values of this step's tokens, or null

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t start_of(int64_t row) const { return query_starts ? query_starts[row] : row; }
  int64_t padded_head_dim() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
  int64_t padded_value_dim() const { return (value_dim + kPanel - 1) / kPanel * kPanel; }
  // The first key that the query at `position` sees.
  int64_t first_seen(int64_t position) const {
    const int64_t of_window = window ? std::max<int64_t>(position - window + 1, 0) : 0;
    return chunk ? std::max(of_window, position / chunk * chunk) : of_window;
  }
};

constexpr int64_t kTileRows = 96;        // of a tile of several queries: packing is then a tenth of the work
constexpr int64_t kWideTileRows = 192;   // where there are tiles enough for all threads
constexpr int64_t kPackingRows = 8;      // that packing a tile's keys and values is worth
constexpr int64_t kPiecesPerThread = 4;  // so that none has long to wait for the last

struct Tile {
  int32_t sequence, first_token, num_queries;
  int32_t position;               // of the first query
  int32_t first_span, end_span;
  int32_t num_pieces;
  int64_t partials;               // offset of the results of its spans in floats, if there are several pieces
};

struct Piece {
  int32_t tile, first_span, end_span;
};

// The keys of a span that the queries of a tile see.
struct Seen {
  int64_t first, end;
  Seen(const PagedAttention& args, const Tile& tile, int64_t span)
      : first(std::max<int64_t>(args.first_seen(tile.position) - span * kSpan, 0)),
        end(std::min<int64_t>(tile.position + tile.num_queries - span * kSpan, kSpan)) {}
  int64_t first_panel() const { return first / kPanel; }
  int64_t end_panel() const { return (end + kPanel - 1) / kPanel; }
};

// Tiles of all sequences, the longest work first.
class Plan {
 public:
  Plan(const PagedAttention& args, int64_t num_sequences) {
    static thread_local Scratch tile_memory, piece_memory, partial_memory, count_memory;
    const int64_t pieces_wanted = kPiecesPerThread * num_threads();
    const int64_t num_rows = args.start_of(num_sequences) * args.num_heads;
    const int64_t tile_rows = num_rows >= kWideTileRows * pieces_wanted ? kWideTileRows : kTileRows;
    const int64_t queries_per_tile = std::max<int64_t>(tile_rows / args.group(), 1);
    int64_t max_tiles = 0;
    for (int64_t i = 0; i < num_sequences; ++i) {
      max_tiles += (args.start_of(i + 1) - args.start_of(i) + queries_per_tile - 1) / queries_per_tile;
    }
    tiles = static_cast<Tile*>(tile_memory.get(max_tiles * sizeof(Tile)));
    int64_t work = 0;
    for (const bool several : {true, false}) {
      for (int64_t i = 0; i < num_sequences; ++i) {
        const int64_t start = args.start_of(i), count = args.start_of(i + 1) - start;
        if (count == 0 || (count > 1) != several) continue;
        for (int64_t query = (count - 1) / queries_per_tile * queries_per_tile; query >= 0; query -= queries_per_tile) {
          const int64_t queries = std::min(queries_per_tile, count - query);
          const int64_t position = args.seq_lens[i] - count + query;
          Tile& tile = tiles[num_tiles++];
          tile = {static_cast<int32_t>(i), static_cast<int32_t>(start + query), static_cast<int32_t>(queries),
                  static_cast<int32_t>(position), static_cast<int32_t>(args.first_seen(position) / kSpan),
                  static_cast<int32_t>((position + queries - 1) / kSpan + 1), 1, 0};
          work += work_of(args, tile);
        }
      }
    }
    const int64_t limit = std::max<int64_t>(work * args.num_kv_heads / pieces_wanted, 1);
    pieces = static_cast<Piece*>(piece_memory.get((2 * num_tiles + pieces_wanted) * sizeof(Piece)));
    int64_t num_partials = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      Tile& tile = tiles[i];
      const int64_t num_spans = tile.end_span - tile.first_span;
      const int64_t cut = num_threads() == 1 ? 1 : std::min((work_of(args, tile) + limit - 1) / limit, num_spans);
      const int64_t spans = (num_spans + cut - 1) / cut;
      tile.num_pieces = static_cast<int32_t>((num_spans + spans - 1) / spans);
      for (int64_t span = tile.first_span; span < tile.end_span; span += spans) {
        pieces[num_pieces++] = {static_cast<int32_t>(i), static_cast<int32_t>(span),
                                static_cast<int32_t>(std::min<int64_t>(span + spans, tile.end_span))};
      }
      if (tile.num_pieces == 1) continue;
      tile.partials = num_partials;
      num_partials += args.num_kv_heads * num_spans * tile.num_queries * args.group() * row_size(args);
    }
    // pages of several heads are neighbours: if there is work for all threads, each takes all heads
    heads_per_item = num_pieces >= pieces_wanted ? args.num_kv_heads : 1;
    items_per_piece = args.num_kv_heads / heads_per_item;
    if (num_partials == 0) return;
    partials = static_cast<float*>(partial_memory.get(num_partials * sizeof(float)));
    unfinished = static_cast<std::atomic<int32_t>*>(count_memory.get(num_tiles * args.num_kv_heads * sizeof(int32_t)));
    for (int64_t i = 0; i < num_tiles * args.num_kv_heads; ++i) {
      new (unfinished + i) std::atomic<int32_t>(tiles[i / args.num_kv_heads].num_pieces);
    }
  }

  // The work that a thread takes at a time: some heads of a piece.
  int64_t num_items() const { return num_pieces * items_per_piece; }
  const Piece& piece(int64_t item) const { return pieces[item / items_per_piece]; }
  int64_t first_head(int64_t item) const { return item % items_per_piece * heads_per_item; }
  const Tile& tile(const Piece& piece) const { return tiles[piece.tile]; }

  // Floats of one row's result: a Softmax, then the weighted values.
  static int64_t row_size(const PagedAttention& args) { return args.padded_value_dim() + kPanel; }

  Tile* tiles = nullptr;
  Piece* pieces = nullptr;
  float* partials = nullptr;
  std::atomic<int32_t>* unfinished = nullptr;  // [tiles][num_kv_heads], pieces
  int64_t num_tiles = 0, num_pieces = 0;
  int64_t heads_per_item = 1, items_per_piece = 1;

 private:
  static int64_t work_of(const PagedAttention& args, const Tile& tile) {
    return (tile.end_span - tile.first_span) * (tile.num_queries * args.group() + kPackingRows);
  }
};

}  // namespace triptych::attention
