// A mixture of experts in one call, of which the sizes do not depend on the choice of experts.
//
//   choose     each row's experts and their weights
//   sort       pairs of a row and one of its experts, by expert: place p of the pairs
//   adapt      before each product, where rows have adapters of their experts: places of one expert and one adapter are
//              multiplied by its A together; the product adds B's part where it finishes an output
//   gate_up    activated[p] = activation(gate) * up        rows of an expert are one product; of experts without a
//              gate, activation(up)
//   down       results[p]
//   sum        out[row] = the row's results times their weights, in the order of its choice
//
//   experts    |   0   |  3  |      5      |        others have no rows, and their weights are not read
//   places     | 0   1 | 2   | 3   4   5   |
//
// Where ranks share the experts, a pair with an expert of another rank has no place, and adds nothing. Once chosen, an
// expert is called by the index of its weights.
//
// Each product prepares its inputs in tiles, then all threads walk the panels of all experts that have rows, in the order
// of memory. An expert with many rows is a product of its own, with loops of its own. A row's result depends neither on
// its batch nor on who shares its experts, unless products of many rows are allowed another arithmetic (`wide_rows`).
#include "linear/product.h"
#include "moe/routing.h"

namespace triptych {
namespace {

// The weights of one product of all experts.
struct Experts {
  WeightForm form;
  const void* weight;    // [num_experts] of panels
  int64_t expert_bytes;  // of the panels of each
  const float* bias;     // [num_experts, panels * kPanel], or null
  int64_t in_features;
  int64_t out_features;
  const Adapter* const* const* adapters;  // by slot, null where it does nothing here: of each expert that is here, or null
};

struct Mixture {
  Routing routing;
  int64_t first_expert;  // index of the first of those that weights are here of
  int64_t held_experts;  // number of these
  Experts gate_up;  // with twice as many outputs as `down` has inputs; without a gate, as many
  Experts down;
  int64_t dtype;
  const void* x;             // [rows, in_features of gate_up], rows x_stride elements apart
  int64_t x_stride;
  void* out;                 // [rows, out_features of down], which are as many
  int64_t activation;
  int64_t scales_input;      // whether the weights multiply x, and not the results
  const void* shared;        // [rows, out_features of down], added to the result; or null
  const float* shared_gate;  // [rows], of which the sigmoid multiplies `shared`; or null
  const int32_t* slots;      // [rows] of each row's adapter, -1 for none; or null: there are no adapters
  int64_t num_adapters;      // number of slots
};

constexpr int64_t kRowsOfOwnLoops = 128;  // an expert with as many rows is a product of its own
constexpr int64_t kFewestTogether = 64, kMostTogether = 1024;  // rows that are computed at a time
constexpr int64_t kResultBytes = 64 << 20;  // of these rows: bounds what lies between the steps
constexpr int64_t kNowhere = -1;
constexpr int64_t kChoicesPerIndex = 16;  // rows that one thread chooses for, or sums, at a time

constexpr int64_t kCountedLayers = 256, kCountedExperts = 1024;  // of those behind them nothing is counted

// Choices since the process began. One thread at a time computes; others may read.
struct ChoiceCounts {
  int64_t most_layers, most_experts;  // the sizes below, from the first reading on: until then all are zeros
  int64_t num_layers;        // up to the last mixture
  int64_t of_busiest_ranks;  // of each call's rank with most of them, where ranks share the experts
  int64_t num_experts[kCountedLayers];  // of each layer; 0: it is no mixture
  int64_t by_layer[kCountedLayers][kCountedExperts];  // by number of the expert
};
ChoiceCounts counts_of_process;

template <typename T>
T* take(Scratch& scratch, int64_t count) {
  return static_cast<T*>(scratch.get(count * sizeof(T)));
}

// Counts what rows have chosen, other ranks' experts included, and calls each by the index of its weights.
void count_and_index(const Mixture& args, int32_t* experts, int64_t count) {
  ChoiceCounts& counts = counts_of_process;
  const Routing& routing = args.routing;
  const bool is_counted = routing.layer >= 0 && routing.layer < kCountedLayers;
  if (is_counted) {
    counts.num_layers = std::max(counts.num_layers, routing.layer + 1);
    counts.num_experts[routing.layer] = std::min(routing.num_experts, kCountedExperts);
    int64_t* by_expert = counts.by_layer[routing.layer];
    for (int64_t pair = 0; pair < count; ++pair) {
      if (experts[pair] < kCountedExperts) ++by_expert[experts[pair]];
    }
  }
  for (int64_t pair = 0; routing.weight_index != nullptr && pair < count; ++pair) {
    experts[pair] = static_cast<int32_t>(routing.weight_index[experts[pair]]);
  }
  if (!is_counted) return;
  const int64_t held = args.held_experts, num_ranks = routing.num_experts / held;
  if (num_ranks < 2) return;
  static thread_local Scratch memory;
  auto* by_rank = take<int64_t>(memory, num_ranks);
  std::fill_n(by_rank, num_ranks, 0);
  for (int64_t pair = 0; pair < count; ++pair) ++by_rank[experts[pair] / held];
  counts.of_busiest_ranks += *std::max_element(by_rank, by_rank + num_ranks);
}

// The rows of one expert.
struct Share {
  int64_t expert;
  int64_t first;  // place of the first
  int64_t rows;
};

// The pairs of some rows, sorted by expert.
struct Pairs {
  int64_t top_k;
  float* weights;    // [rows * top_k] by pair, row * top_k + number of the choice
  int64_t* places;   // [rows * top_k] by pair; kNowhere if its expert is another rank's
  int64_t count;     // of places
  int64_t* rows;     // [count] by place
  float* by_place;   // [count], the weights
  Share* shares;     // of the experts that have rows, in their order
  int64_t num_shares;
};

// Rows first … first + rows - 1.
Pairs choose(const Mixture& args, int64_t first, int64_t rows) {
  static thread_local Scratch expert_memory, weight_memory, place_memory, row_memory, sorted_memory, share_memory, ends;
  const Routing& routing = args.routing;
  const int64_t top_k = routing.top_k, count = rows * top_k, held = args.held_experts;
  auto* experts = take<int32_t>(expert_memory, count);
  Pairs pairs{top_k, take<float>(weight_memory, count), take<int64_t>(place_memory, count),
              0, take<int64_t>(row_memory, count), take<float>(sorted_memory, count),
              take<Share>(share_memory, std::min(count, held)), 0};
  for_rows(rows, kChoicesPerIndex, [&](int64_t begin, int64_t end) {
    static thread_local Scratch memory;
    Router router(routing, take<float>(memory, Router::num_floats(routing)));
    for (int64_t row = begin; row < end; ++row) {
      router.choose(first + row, experts + row * top_k, pairs.weights + row * top_k);
    }
  });
  count_and_index(args, experts, count);
  auto* next = take<int64_t>(ends, held + 1);  // place of each expert's next row
  std::fill_n(next, held + 1, 0);
  // of this rank's experts, from 0; held or more: another's
  const auto own = [&](int64_t pair) { return static_cast<uint64_t>(experts[pair] - args.first_expert); };
  const auto is_here = [&](int64_t pair) { return own(pair) < static_cast<uint64_t>(held); };
  for (int64_t pair = 0; pair < count; ++pair) {
    if (is_here(pair)) ++next[own(pair) + 1];
  }
  for (int64_t expert = 0; expert < held; ++expert) {
    if (next[expert + 1]) pairs.shares[pairs.num_shares++] = {expert, next[expert], next[expert + 1]};
    next[expert + 1] += next[expert];
  }
  pairs.count = next[held];
  for (int64_t pair = 0; pair < count; ++pair) {
    pairs.places[pair] = kNowhere;
    if (!is_here(pair)) continue;
    const int64_t place = next[own(pair)]++;
    pairs.places[pair] = place;
    pairs.rows[place] = pair / top_k;
    pairs.by_place[place] = pairs.weights[pair];
  }
  return pairs;
}

// What adapters add to one product, by place.
class AdaptedPlaces {
 public:
  // Rows first … are those of `pairs`.
  AdaptedPlaces(const Mixture& args, const Experts& experts, int64_t first, const Pairs& pairs) {
    if (args.slots == nullptr || !has_adapters(args, experts, first, pairs)) return;
    static thread_local Scratch slot_memory, tile_memory, open_memory, own_memory, row_memory, product_memory;
    auto* slots = take<int32_t>(slot_memory, pairs.count);
    for (int64_t place = 0; place < pairs.count; ++place) slots[place] = args.slots[first + pairs.rows[place]];
    tiles_ = take<AdaptedTile>(tile_memory, pairs.count);
    auto** open = take<AdaptedTile*>(open_memory, args.num_adapters);
    auto** own = take<const Adapter*>(own_memory, args.num_adapters);
    rows_ = take<AdaptedRow>(row_memory, pairs.count);
    for (int64_t i = 0; i < pairs.num_shares; ++i) {
      const Share& share = pairs.shares[i];
      for (int64_t slot = 0; slot < args.num_adapters; ++slot) {
        own[slot] = experts.adapters[slot] == nullptr ? nullptr : experts.adapters[slot][share.expert];
      }
      const int64_t end = count_ + tile_adapted_rows(slots + share.first, own, args.num_adapters, share.rows,
                                                     tiles_ + count_, open);
      for (; count_ < end; ++count_) {
        for (int row = 0; row < tiles_[count_].count; ++row) tiles_[count_].rows[row] += share.first;
      }
      for (int64_t place = share.first; place < share.first + share.rows; ++place) {
        const Adapter* adapter = slots[place] < 0 ? nullptr : own[slots[place]];
        rows_[place] = {adapter == nullptr ? nullptr : adapter->panels, nullptr};
      }
    }
    if (count_ == 0) return;  // of experts that no row has chosen
    rank_ = largest_rank(tiles_, count_);
    products_ = take<float>(product_memory, pairs.count * rank_);
    for (int64_t place = 0; place < pairs.count; ++place) rows_[place].products = products_ + place * rank_;
  }

  // Lets a product of which row 0 is place 0 read what `multiply` makes.
  void adapt(Linear& linear) const {
    if (count_ == 0) return;
    linear.adapted = rows_;
    linear.adapter_dtype = tiles_[0].adapter->dtype;
  }

  void multiply(const Linear& linear) const {
    if (count_ > 0) multiply_by_a(linear, tiles_, count_, rank_, products_);
  }

 private:
  static bool has_adapters(const Mixture& args, const Experts& experts, int64_t first, const Pairs& pairs) {
    for (int64_t place = 0; place < pairs.count; ++place) {
      const int32_t slot = args.slots[first + pairs.rows[place]];
      if (slot >= 0 && experts.adapters[slot] != nullptr) return true;
    }
    return false;
  }

  AdaptedTile* tiles_;
  AdaptedRow* rows_;
  float* products_;
  int64_t count_ = 0, rank_ = 0;  // of tiles, and of the largest adapter
};

// One product of all experts with the rows that chose them: its operands by share.
class ExpertProducts {
 public:
  // like: x, out and what is done with the outputs, of place 0
  ExpertProducts(const Experts& experts, const Pairs& pairs, const Linear& like, Scratch& linear_memory,
                 Scratch& tile_memory, Scratch& input_memory)
      : experts_(experts), pairs_(pairs) {
    linears_ = take<Linear>(linear_memory, pairs.num_shares);
    first_tiles_ = take<int64_t>(tile_memory, 2 * (pairs.num_shares + 1));
    first_bytes_ = first_tiles_ + pairs.num_shares + 1;
    first_tiles_[0] = first_bytes_[0] = 0;
    const int64_t x_bytes = like.dtype == kFloat32 ? 4 : 2, out_bytes = like.out_dtype == kFloat32 ? 4 : 2;
    Linear linear = like;
    linear.in_features = experts.in_features;
    linear.out_features = experts.out_features;
    steps_ = product_of(linear, experts.form);
    for (int64_t i = 0; i < pairs.num_shares; ++i) {
      const Share& share = pairs.shares[i];
      linear.x = static_cast<const char*>(like.x) + share.first * like.x_stride * x_bytes;
      linear.out = static_cast<char*>(like.out) + share.first * like.out_stride * out_bytes;
      linear.weight = static_cast<const char*>(experts.weight) + share.expert * experts.expert_bytes;
      if (experts.bias) linear.bias = experts.bias + share.expert * linear.num_panels() * kPanel;
      if (like.adapted) linear.adapted = like.adapted + share.first;
      linears_[i] = linear;
      const int64_t bytes = has_own_loops(share) ? 0 : steps_.input_bytes(linear, share.rows);
      first_tiles_[i + 1] = first_tiles_[i] + steps_.num_tiles(share.rows);
      first_bytes_[i + 1] = first_bytes_[i] + (bytes + 63) / 64 * 64;
      most_rows_ = std::max(most_rows_, share.rows);
    }
    inputs_ = take<char>(input_memory, first_bytes_[pairs.num_shares]);
  }

  // make(first place, end) makes rows of x.
  template <typename F>
  void prepare(const F& make) const {
    parallel_for(first_tiles_[pairs_.num_shares], [&](int64_t index) {
      const int64_t i = std::upper_bound(first_tiles_, first_tiles_ + pairs_.num_shares, index) - first_tiles_ - 1;
      const Share& share = pairs_.shares[i];
      const int64_t tile = index - first_tiles_[i];
      make(share.first + steps_.first_row(tile, share.rows), share.first + steps_.first_row(tile + 1, share.rows));
      if (!has_own_loops(share)) steps_.prepare(linears_[i], share.rows, tile, inputs_ + first_bytes_[i]);
    });
  }

  void multiply() const {
    const int64_t panels = (experts_.out_features + kPanel - 1) / kPanel;
    const auto multiply_panel = [&](int64_t index) {
      const int64_t i = index / panels;
      const Share& share = pairs_.shares[i];
      if (has_own_loops(share)) return;
      steps_.multiply(linears_[i], experts_.form, share.rows, inputs_ + first_bytes_[i], index % panels);
    };
    const int64_t count = pairs_.num_shares * panels;
    most_rows_ <= kFewRows ? parallel_for_parts(count, multiply_panel) : parallel_for(count, multiply_panel);
    for (int64_t i = 0; i < pairs_.num_shares && most_rows_ >= fewest_of_own_loops(); ++i) {
      if (has_own_loops(pairs_.shares[i])) steps_.run(linears_[i], experts_.form, pairs_.shares[i].rows);
    }
  }

 private:
  int64_t fewest_of_own_loops() const {
    const bool may_be_wide = experts_.form.kind == kQuantizedWeight || experts_.form.kind == kCodedWeight;
    return may_be_wide ? std::min(experts_.form.wide_rows, kRowsOfOwnLoops) : kRowsOfOwnLoops;
  }
  bool has_own_loops(const Share& share) const { return share.rows >= fewest_of_own_loops(); }

  const Experts& experts_;
  const Pairs& pairs_;
  ProductSteps steps_;
  Linear* linears_;
  int64_t *first_tiles_, *first_bytes_;  // of each share, and the end of the last
  int64_t most_rows_ = 0;
  char* inputs_;
};

// Rows of x, times the weights if `weights` are not null.
template <typename T>
void gather(const Mixture& args, int64_t first, const Pairs& pairs, int64_t begin, int64_t end, T* to) {
  const int64_t size = args.gate_up.in_features;
  for (int64_t place = begin; place < end; ++place) {
    const T* from = static_cast<const T*>(args.x) + (first + pairs.rows[place]) * args.x_stride;
    T* row = to + place * size;
    if (!args.scales_input) {
      std::memcpy(row, from, size * sizeof(T));
      continue;
    }
    for (int64_t i = 0; i < size; ++i) store_one(row + i, to_float(from[i]) * pairs.by_place[place]);
  }
}

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Row `row` of `out`, of which `own` are the places among `results`; rows of these are padded.
template <typename T>
void sum_results(const Mixture& args, const Pairs& pairs, int64_t row, const int64_t* places, const float* weights,
                 const float* results) {
  const int64_t size = args.down.out_features, stride = padded(size);
  T* out = static_cast<T*>(args.out) + row * size;
  const T* shared = args.shared ? static_cast<const T*>(args.shared) + row * size : nullptr;
  const float gate = args.shared_gate ? 1.0f / (1.0f + std::exp(-args.shared_gate[row])) : 1.0f;
  for (int64_t at = 0; at < size; at += kLanes) {
    const int64_t left = size - at;
    vec sum = zero();
    for (int64_t i = 0; i < pairs.top_k; ++i) {
      if (places[i] == kNowhere) continue;
      const vec result = load(results + places[i] * stride + at);
      sum = args.scales_input ? sum + result : fma(splat(weights[i]), result, sum);
    }
    if (shared) {
      float lanes[kLanes] = {};
      for (int64_t i = 0; i < std::min<int64_t>(left, kLanes); ++i) lanes[i] = to_float(shared[at + i]);
      sum = fma(splat(gate), load(lanes), sum);
    }
    store_vec(out + at, sum, left);
  }
}

template <typename T>
void mix(const Mixture& args, int64_t first, int64_t rows) {
  static thread_local Scratch gathered_memory, activated_memory, result_memory, linears, tiles, inputs;
  const Pairs pairs = choose(args, first, rows);
  const int64_t count = pairs.count, size = args.gate_up.in_features, inner = args.down.in_features;
  T* gathered = take<T>(gathered_memory, count * size);
  T* activated = take<T>(activated_memory, count * inner);
  float* results = take<float>(result_memory, count * padded(size));

  Linear up{};
  up.dtype = up.out_dtype = args.dtype;
  up.x = gathered;
  up.x_stride = size;
  up.out = activated;
  up.out_stride = inner;
  up.activation = args.activation;
  up.gated = args.gate_up.out_features != inner;
  up.in_features = size;
  const AdaptedPlaces up_adapters(args, args.gate_up, first, pairs);
  up_adapters.adapt(up);
  const ExpertProducts gate_up(args.gate_up, pairs, up, linears, tiles, inputs);
  gate_up.prepare([&](int64_t begin, int64_t end) { gather(args, first, pairs, begin, end, gathered); });
  up_adapters.multiply(up);
  gate_up.multiply();

  Linear down{};
  down.dtype = args.dtype;
  down.out_dtype = kFloat32;
  down.x = activated;
  down.x_stride = inner;
  down.out = results;
  down.out_stride = padded(size);
  down.in_features = inner;
  const AdaptedPlaces down_adapters(args, args.down, first, pairs);
  down_adapters.adapt(down);
  const ExpertProducts to_hidden(args.down, pairs, down, linears, tiles, inputs);
  to_hidden.prepare([](int64_t, int64_t) {});
  down_adapters.multiply(down);
  to_hidden.multiply();

  for_rows(rows, kChoicesPerIndex, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      sum_results<T>(args, pairs, first + row, pairs.places + row * pairs.top_k, pairs.weights + row * pairs.top_k,
                     results);
    }
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(fused_moe, triptych::Mixture,
                routing.dtype, routing.logits, routing.stride, routing.num_experts, routing.top_k, routing.score,
                routing.renormalize, routing.scale, routing.jitter, routing.num_groups, routing.top_groups, routing.group_experts,
                routing.correction, routing.expert_scales, routing.weight_index, routing.layer, first_expert, held_experts,
                gate_up.form.kind, gate_up.form.form, gate_up.form.bits, gate_up.form.affine, gate_up.form.input_bits, gate_up.form.wide_rows, gate_up.form.wide_bits, gate_up.weight,
                gate_up.expert_bytes, gate_up.bias, gate_up.in_features, gate_up.out_features, gate_up.adapters, down.form.kind,
                down.form.form, down.form.bits, down.form.affine, down.form.input_bits, down.form.wide_rows,
                down.form.wide_bits, down.weight, down.expert_bytes, down.bias, down.in_features, down.out_features,
                down.adapters, dtype, x, x_stride, out, activation, scales_input, shared, shared_gate, slots,
                num_adapters) {
  using namespace triptych;
  const int64_t row_bytes = args.routing.top_k * padded(args.down.out_features) * sizeof(float);
  const int64_t together = std::clamp(kResultBytes / row_bytes, kFewestTogether, kMostTogether);
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t count = std::min(together, rows - first);
    args.dtype == kFloat32 ? mix<float>(args, first, count) : mix<bf16>(args, first, count);
  }
}

// The counts of this library: see ChoiceCounts.
extern "C" const int64_t* triptych_expert_counts() {
  triptych::counts_of_process.most_layers = triptych::kCountedLayers;
  triptych::counts_of_process.most_experts = triptych::kCountedExperts;
  return &triptych::counts_of_process.most_layers;
}
