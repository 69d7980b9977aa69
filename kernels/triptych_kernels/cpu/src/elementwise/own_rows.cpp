// A rank's part of a vocabulary that ranks share: ids as it numbers them, and zeros for those that others have.
#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "parallel.h"

namespace triptych {
namespace {

struct LocalIds {
  const int64_t* ids;  // [rows]
  int64_t* out;        // [rows], the id less `first`, or 0 where the row is another rank's
  int64_t first;
  int64_t count;       // ids of this rank
};

struct ClearOtherRows {
  const int64_t* ids;  // [rows]
  void* x;             // [rows, row_bytes], zeroed where the id is another rank's
  int64_t first;
  int64_t count;
  int64_t row_bytes;
};

constexpr int64_t kRowsPerIndex = 64;

bool is_own(int64_t id, int64_t first, int64_t count) { return id >= first && id < first + count; }

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(local_ids, triptych::LocalIds, ids, out, first, count) {
  using namespace triptych;
  for (int64_t row = 0; row < rows; ++row) {
    args.out[row] = is_own(args.ids[row], args.first, args.count) ? args.ids[row] - args.first : 0;
  }
}

TRIPTYCH_KERNEL(clear_other_rows, triptych::ClearOtherRows, ids, x, first, count, row_bytes) {
  using namespace triptych;
  parallel_for((rows + kRowsPerIndex - 1) / kRowsPerIndex, [&](int64_t index) {
    const int64_t end = std::min((index + 1) * kRowsPerIndex, rows);
    for (int64_t row = index * kRowsPerIndex; row < end; ++row) {
      if (is_own(args.ids[row], args.first, args.count)) continue;
      std::memset(static_cast<char*>(args.x) + row * args.row_bytes, 0, args.row_bytes);
    }
  });
}
