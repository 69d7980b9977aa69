// Filling weights in the formats of published checkpoints (coded.h), and reading rows back.
#include "linear/panel_codes.h"

namespace triptych {
namespace {

using coded::CodedForm;
using coded::Reader;

// How codes lie in a file, as coded.py numbers it. Those of an output are a stream of bits, the lowest first.
enum CodeOrder : int64_t {
  kByRow,    // [rows][stream]
  kByWord,   // [words of a stream][rows]
  kByInput,  // [in_features][words of 8 rows], of 4 bits: no streams
};
// Place in a word of kByInput of each of eight neighbours.
constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr int kInWord = 8;
constexpr int kMaxWords = 8;   // of a group of one output
constexpr int kWidth = kPanel + kInWord;
constexpr int64_t kRun = 8;    // panels that one thread fills side by side, since a file may have inputs first

// Parts of rows, each in the type in which panels store it, or null.
struct PackCodes {
  int64_t form;
  const char* codes;
  int64_t order;             // CodeOrder
  int64_t bits;              // of a code in the file
  int64_t stride;            // bytes from one row to the next; unless kByRow, from one word or input
  int64_t skip;              // rows of the first word that are not meant, of kByInput
  int64_t shift;             // is added to codes
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

// Streams of a group, a word of each output side by side.
using Words = uint32_t[kMaxWords][kWidth];

inline uint32_t word_at(const char* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Words of rows `row` … `row + count - 1` of the file, of kByInput from the beginning of a word on. Returns the place
// of the first.
int read_words(const PackCodes& args, int64_t row, int64_t count, int64_t group, Words& words) {
  const int64_t num = args.bits;  // a group of 32 codes is as many words as a code has bits
  if (args.order == kByRow) {
    for (int64_t i = 0; i < count; ++i) {
      const char* from = args.codes + (row + i) * args.stride + group * num * 4;
      for (int word = 0; word < num; ++word) words[word][i] = word_at(from + word * 4);
    }
    return 0;
  }
  if (args.order == kByWord) {
    for (int word = 0; word < num; ++word) {
      std::memcpy(words[word], args.codes + (group * num + word) * args.stride + row * 4, count * 4);
    }
    return 0;
  }
  const int64_t first = (args.skip + row) / kInWord, last = (args.skip + row + count - 1) / kInWord;
  for (int word = 0; word < num; ++word) {
    const char* const from = args.codes + (group * kGroup + word * kInWord) * args.stride;
    for (int64_t at = first; at <= last; ++at) {
      uint32_t streams[kInWord] = {};
      for (int input = 0; input < kInWord; ++input) {
        const uint32_t codes = word_at(from + input * args.stride + at * 4);
        for (int i = 0; i < kInWord; ++i) streams[i] |= (codes >> 4 * kPlaces[i] & 15) << 4 * input;
      }
      std::memcpy(words[word] + (at - first) * kInWord, streams, sizeof streams);
    }
  }
  return static_cast<int>(args.skip + row - first * kInWord);
}

// Four nibbles, the lowest of a word, one in each byte.
inline uint32_t spread(uint32_t word) {
  const uint32_t pairs = (word | word << 8) & 0x00ff00ff;
  return (pairs | pairs << 4) & 0x0f0f0f0f;
}

// Streams of 4 bits as panels of 4 bits have them: outputs `lane` … `lane + count - 1`.
void put_nibbles(const Words& words, int start, int64_t count, char* panel_words, int64_t lane) {
  for (int word = 0; word < 4; ++word) {
    const uint32_t *low = words[word / 2] + start, *high = words[2 + word / 2] + start;
    const int shift = word % 2 * 16;
    uint32_t out[kPanel];
    for (int64_t i = 0; i < count; ++i) {
      out[i] = spread(low[i] >> shift & 0xffff) | spread(high[i] >> shift & 0xffff) << 4;
    }
    std::memcpy(panel_words + (word * kPanel + lane) * sizeof *out, out, count * sizeof *out);
  }
}

// The codes of a group of one output, one in each byte.
void read_codes(const Words& words, int output, int bits, uint8_t shift, uint8_t* codes) {
  uint64_t stream = 0;
  int left = 0, word = 0;
  for (int i = 0; i < kGroup; ++i) {
    if (left < bits) {
      stream |= static_cast<uint64_t>(words[word++][output]) << left;
      left += 32;
    }
    codes[i] = static_cast<uint8_t>((stream & ((1u << bits) - 1)) + shift);
    stream >>= bits;
    left -= bits;
  }
}

// An element of `bytes` of each row, at `from` of the first and `stride` bytes further of each next one.
template <typename T>
void put_each(char* to, int64_t lane, const char* from, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + (lane + i) * sizeof(T), from + i * stride, sizeof(T));
}

// `num` elements of each row, of which there are `per_row`, from number `at` on; returns what follows in the panel.
char* put(char* to, int64_t lane, const char* rows, int64_t count, int64_t per_row, int64_t at, int64_t num,
          int64_t bytes) {
  for (int64_t i = at; i < at + num; ++i, to += kPanel * bytes) {
    const char* const from = rows + i * bytes;
    if (bytes == 1) put_each<uint8_t>(to, lane, from, per_row * bytes, count);
    if (bytes == 2) put_each<uint16_t>(to, lane, from, per_row * bytes, count);
    if (bytes == 4) put_each<uint32_t>(to, lane, from, per_row * bytes, count);
  }
  return to;
}

// One group of rows first … end - 1, which are of one panel, and what its block has before it.
void pack_group(const PackCodes& args, const CodedForm& form, int64_t group, int64_t first, int64_t end) {
  const int64_t groups = args.in_features / kGroup, blocks = (args.in_features + form.block - 1) / form.block;
  const int64_t row = first - args.first_row, count = end - first, in_block = form.block / kGroup;
  const bool in_levels = form.scale == coded::kTwoLevels;
  const int64_t scales = in_levels ? 1 : form.num_scales, scale_bytes = form.scale_bytes();
  const int64_t offset_bytes = form.offset == coded::kZeroPoint ? 1 : scale_bytes, block = group / in_block;
  const Place place = place_of(first, args.half);
  char* to = args.panels + place.panel * form.panel_bytes(args.in_features);
  // `row` of rows of so many elements
  const auto of_row = [&](const char* rows, int64_t bytes) { return rows + row * bytes; };
  if (args.factors) {
    const char* const factors = of_row(reinterpret_cast<const char*>(args.factors), 4);
    if (group == 0) put(to, place.lane, factors, count, 1, 0, 1, 4);
    to += kPanel * 4;
  }
  to += block * (form.head_bytes + in_block * form.group_bytes);
  if (group % in_block == 0) {
    const int64_t per_row = blocks * scales;
    const auto put_scales = [&](char* at, const char* rows, int64_t bytes) {
      return put(at, place.lane, of_row(rows, per_row * bytes), count, per_row, block * scales, scales, bytes);
    };
    char* const next = put_scales(to, args.scales, scale_bytes);
    if (args.offsets) put_scales(next, args.offsets, offset_bytes);
  }
  to += form.head_bytes + group % in_block * form.group_bytes;
  const int64_t units = form.num_scales, per_row = groups * units;
  for (const char* const rows : {args.multiples, args.minima}) {
    if (rows) to = put(to, place.lane, of_row(rows, per_row), count, per_row, group * units, units, 1);
  }

  Words words;
  const int start = read_words(args, row, count, group, words);
  if (args.bits == 4 && form.bits == 4 && args.shift == 0) return put_nibbles(words, start, count, to, place.lane);
  for (int64_t i = 0; i < count; ++i) {
    uint8_t codes[kGroup];
    read_codes(words, start + i, args.bits, args.shift, codes);
    coded::put_codes(form.bits, codes, to, place.lane + i);
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
                form, codes, order, bits, stride, skip, shift, scales, offsets, multiples, minima, factors, panels,
                in_features, first_row, half) {
  using namespace triptych;
  const CodedForm form(args.form);
  coded::for_panels(args.first_row, rows, args.half, kRun, [&](const auto& for_each_panel) {
    for (int64_t group = 0; group < args.in_features / kGroup; ++group) {
      for_each_panel([&](int64_t first, int64_t end) { pack_group(args, form, group, first, end); });
    }
  });
}

TRIPTYCH_KERNEL(coded_embedding, triptych::CodedEmbedding,
                form, out_dtype, panels, token_ids, out, in_features) {
  using namespace triptych;
  args.out_dtype == kFloat32 ? embed<float>(args, rows) : embed<bf16>(args, rows);
}
