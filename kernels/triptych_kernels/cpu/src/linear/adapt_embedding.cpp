// What each row's adapter adds to the embedding of its token: B (A[:, token]).
#include "linear/panel.h"

namespace triptych {
namespace {

struct AdaptEmbedding {
  const int32_t* slots;            // [rows]
  const Adapter* const* adapters;  // A is [tokens, rank]
  const int64_t* token_ids;        // [rows]
  float* x;                        // [rows, size], to which it is added
  int64_t size;
};

constexpr int64_t kRowsPerIndex = 8;
constexpr int64_t kMostProducts = 256;  // the largest rank

template <typename T>
void adapt(const AdaptEmbedding& args, const Adapter& adapter, int64_t row) {
  float products[kMostProducts];
  const T* a = static_cast<const T*>(adapter.a) + args.token_ids[row] * adapter.rank;
  for (int64_t i = 0; i < adapter.rank; ++i) products[i] = to_float(a[i]);
  float* to = args.x + row * args.size;
  for (int64_t panel = 0; panel * kPanel < args.size; ++panel, to += kPanel) {
    vec first = zero(), second = zero();
    const AdapterPanel& own = adapter.panels[panel];
    add_panel(own, static_cast<const T*>(own.weights), products, first, second);
    float sums[kPanel];
    store(sums, first);
    store(sums + kLanes, second);
    const int64_t count = std::min<int64_t>(kPanel, args.size - panel * kPanel);
    for (int64_t i = 0; i < count; ++i) to[i] += sums[i];
  }
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(adapt_embedding, triptych::AdaptEmbedding, slots, adapters, token_ids, x, size) {
  using namespace triptych;
  if (!has_adapted_rows(args.slots, args.adapters, rows)) return;
  for_rows(rows, kRowsPerIndex, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const int32_t slot = args.slots[row];
      if (slot < 0 || args.adapters[slot] == nullptr) continue;
      const Adapter& adapter = *args.adapters[slot];
      adapter.dtype == kFloat32 ? adapt<float>(args, adapter, row) : adapt<bf16>(args, adapter, row);
    }
  });
}
