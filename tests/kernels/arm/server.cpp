// Runs the kernels of a library for a process on another architecture: `server LIBRARY`, requests on standard input,
// replies on standard output, in 8-byte integers of this machine's order.
//
// A request names a symbol (64 bytes, padded with zeros) and says how to call it:
//
//   kListFields                                             -> length, text: a line "name kind" per field
//   kCallPlain    argument                                  -> result
//   kCallKernel   rows, struct bytes, number of regions, number of addresses, struct,
//                 per region its bytes, per address (offset in the struct, region, offset in the region),
//                 the regions                               -> result, the regions
//
// Regions are the memory of the caller's tensors. Behind each lie kCanaryBytes, which kernels must leave as they are.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernel.h"

namespace {

enum Kind : int64_t { kListFields = 0, kCallPlain = 1, kCallKernel = 2 };
constexpr int64_t kAlignment = 64, kCanaryBytes = 256;
constexpr unsigned char kCanary = 0xa5;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "server: %s\n", why.c_str());
  std::exit(1);
}

void read_bytes(void* to, int64_t size) {
  if (static_cast<int64_t>(std::fread(to, 1, size, stdin)) != size) fail("the request ends early");
}

int64_t read_int() {
  int64_t value;
  read_bytes(&value, sizeof value);
  return value;
}

void write_bytes(const void* from, int64_t size) { std::fwrite(from, 1, size, stdout); }

void write_int(int64_t value) { write_bytes(&value, sizeof value); }

class Region {
 public:
  explicit Region(int64_t size) : size_(size) {
    const int64_t room = (size + kCanaryBytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, room));
    std::memset(bytes_ + size, kCanary, kCanaryBytes);
  }
  ~Region() { std::free(bytes_); }
  Region(const Region&) = delete;

  unsigned char* bytes() { return bytes_; }
  int64_t size() const { return size_; }
  bool is_whole() const {
    for (int64_t i = 0; i < kCanaryBytes; ++i) {
      if (bytes_[size_ + i] != kCanary) return false;
    }
    return true;
  }

 private:
  unsigned char* bytes_;
  int64_t size_;
};

void list_fields(const triptych::Field* fields) {
  std::string text;
  for (; fields->name != nullptr; ++fields) {
    text += std::string(fields->name) + ' ' + static_cast<char>(fields->kind) + '\n';
  }
  write_int(static_cast<int64_t>(text.size()));
  write_bytes(text.data(), static_cast<int64_t>(text.size()));
}

void call_kernel(const std::string& name, int64_t (*kernel)(const void*, int64_t)) {
  const int64_t rows = read_int(), struct_bytes = read_int(), num_regions = read_int(), num_addresses = read_int();
  std::vector<char> args(struct_bytes);
  read_bytes(args.data(), struct_bytes);
  std::vector<std::unique_ptr<Region>> regions;
  for (int64_t i = 0; i < num_regions; ++i) regions.push_back(std::make_unique<Region>(read_int()));
  for (int64_t i = 0; i < num_addresses; ++i) {
    const int64_t field = read_int(), region = read_int(), offset = read_int();
    const unsigned char* address = regions[region]->bytes() + offset;
    std::memcpy(args.data() + field, &address, sizeof address);
  }
  for (auto& region : regions) read_bytes(region->bytes(), region->size());
  write_int(kernel(args.data(), rows));
  for (auto& region : regions) {
    if (!region->is_whole()) fail(name + " writes past the end of an operand");
    write_bytes(region->bytes(), region->size());
  }
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  char name[64];
  while (std::fread(name, 1, sizeof name, stdin) == sizeof name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) fail(dlerror());
    switch (read_int()) {
      case kListFields:
        list_fields(reinterpret_cast<const triptych::Field* (*)()>(symbol)());
        break;
      case kCallPlain:
        write_int(reinterpret_cast<int64_t (*)(int64_t)>(symbol)(read_int()));
        break;
      case kCallKernel:
        call_kernel(name, reinterpret_cast<int64_t (*)(const void*, int64_t)>(symbol));
        break;
      default:
        fail("no such kind of request");
    }
    std::fflush(stdout);
  }
}
