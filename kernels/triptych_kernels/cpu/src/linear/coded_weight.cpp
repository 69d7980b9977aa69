// Filling weights in the formats of published checkpoints (coded.h), and reading rows back.
#include "linear/panel_codes.h"

namespace triptych {
namespace {

using coded::CodedForm;
using coded::Reader;

// Parts of rows, each in the type in which panels store it, or null.
struct PackCodes {
  int64_t form;
  const uint8_t* codes;      // [rows, in_features]
  const char* scales;        // [rows, scales of all blocks]
  const char* offsets;       // the same
  const char* multiples;     // [rows, units]
  const char* minima;        // [rows, units]
  const float* factors;      // [rows]
  char* panels;
  int64_t in_features;
  int64_t first_row;         // where the first row goes, in its piece
  int64_t half;              // as for place_of
};

struct CodedEmbedding {
  int64_t form;
  int64_t out_dtype;
  const char* panels;
  const int64_t* token_ids;  // [rows]
  void* out;                 // [rows, in_features]
  int64_t in_features;
};

// Elements `from` of one output, of which panels hold kPanel side by side; returns what follows in the panel.
char* put(char* to, int64_t lane, const char*& from, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i, to += kPanel * bytes, from += bytes) std::memcpy(to + lane * bytes, from, bytes);
  return to;
}

void pack_row(const PackCodes& args, const CodedForm& form, int64_t row, int64_t lane, char* panel) {
  const int64_t groups = args.in_features / kGroup, blocks = (args.in_features + form.block - 1) / form.block;
  const bool in_levels = form.scale == coded::kTwoLevels;
  const int64_t per_block = in_levels ? 1 : form.num_scales, scale_bytes = form.scale_bytes();
  const int64_t offset_bytes = form.offset == coded::kZeroPoint ? 1 : scale_bytes;
  const uint8_t* codes = args.codes + row * args.in_features;
  const char* scales = args.scales + row * blocks * per_block * scale_bytes;
  const char* offsets = args.offsets + row * blocks * per_block * offset_bytes;
  const char* multiples = args.multiples + row * groups * form.num_scales;
  const char* minima = args.minima + row * groups * form.num_scales;
  char* to = panel;
  if (args.factors) {
    const char* factor = reinterpret_cast<const char*>(args.factors + row);
    to = put(to, lane, factor, 1, sizeof *args.factors);
  }
  for (int64_t group = 0; group < groups; ++group, codes += kGroup) {
    if (group % (form.block / kGroup) == 0) {
      to = put(to, lane, scales, per_block, scale_bytes);
      if (args.offsets) to = put(to, lane, offsets, per_block, offset_bytes);
    }
    if (args.multiples) to = put(to, lane, multiples, form.num_scales, 1);
    if (args.minima) to = put(to, lane, minima, form.num_scales, 1);
    coded::put_codes(form.bits, codes, to, lane);
    to += kPanel * kGroup * form.bits / 8;
  }
}

template <typename O>
void embed(const CodedEmbedding& args, int64_t rows) {
  const CodedForm form(args.form);
  parallel_for(rows, [&](int64_t row) {
    const Place place = place_of(args.token_ids[row], -1);
    O* to = static_cast<O*>(args.out) + row * args.in_features;
    Reader reader(form, args.panels + place.panel * form.panel_bytes(args.in_features));
    float group[kGroup * kPanel];
    for (int64_t at = 0; at < args.in_features; at += kGroup, to += kGroup) {
      coded::unpack_floats(reader, 1, group);
      for (int input = 0; input < kGroup; ++input) store_one(to + input, group[input * kPanel + place.lane]);
    }
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(pack_codes, triptych::PackCodes,
                form, codes, scales, offsets, multiples, minima, factors, panels, in_features, first_row, half) {
  using namespace triptych;
  const CodedForm form(args.form);
  coded::for_panel_rows(args.first_row, rows, args.half, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const Place place = place_of(row, args.half);
      char* const panel = args.panels + place.panel * form.panel_bytes(args.in_features);
      pack_row(args, form, row - args.first_row, place.lane, panel);
    }
  });
}

TRIPTYCH_KERNEL(coded_embedding, triptych::CodedEmbedding,
                form, out_dtype, panels, token_ids, out, in_features) {
  using namespace triptych;
  args.out_dtype == kFloat32 ? embed<float>(args, rows) : embed<bf16>(args, rows);
}
