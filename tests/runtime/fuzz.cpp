// Loads damaged copies of an engine and, where one is let pass, runs a frame: no crash, no leak (it is built with
// sanitizers), a code and a sentence each time.   fuzz ENGINE FOLDER ROUNDS
//
// Cut at every 4 KB; single bytes changed, which the checksum finds; and changed with the checksum made right again, in the
// head mostly, so that what is behind the checksum has to hold, too.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "file.h"
#include "voxmma/voxmma.h"

namespace {

using Bytes = std::vector<unsigned char>;

std::string path;
std::map<vxm_code, int> seen;

// No more than a test machine has; none at all once *left is used up.
void* allocate(void* left, size_t bytes) {
  if (bytes > (size_t{1} << 28) || (*static_cast<int*>(left))-- <= 0) return nullptr;
  return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
}
void release(void*, void* memory) { std::free(memory); }

void fail(const char* what, const std::string& how) {
  std::fprintf(stderr, "%s: %s (%s)\n", how.c_str(), what, vxm_last_error());
  std::exit(1);
}

void run_frame(vxm_engine* engine, const std::string& how) {
  vxm_engine_info info;
  if (vxm_engine_get_info(engine, &info) != VXM_OK) fail("no info", how);
  std::vector<vxm_input> inputs(static_cast<size_t>(info.inputs));
  std::vector<Bytes> data(inputs.size());
  std::vector<std::vector<int32_t>> coords(inputs.size());
  for (int32_t i = 0; i < info.inputs; ++i) {
    vxm_input_info of;
    if (vxm_engine_input(engine, i, &of) != VXM_OK) fail("no input", how);
    const bool sparse = of.kind != VXM_TENSOR;
    int64_t rows = sparse ? std::min<int64_t>(of.shape[0], 40) : 0, count = 1;
    for (int32_t d = sparse ? 1 : 0; d < of.dims; ++d) count *= of.shape[d];
    if (count > (1 << 24)) return;
    data[i].assign(static_cast<size_t>((sparse ? rows : 1) * count) * vxm_dtype_size(of.dtype), 0);
    for (int32_t r = 0; r < rows; ++r) {  // within the bounds or not: both are to be told
      const int32_t row[4] = {0, of.low[1] + r % 4, of.low[2] + r / 4 % 4, of.low[3] + r / 16};
      coords[i].insert(coords[i].end(), row, row + 4);
      if (of.kind == VXM_POINTS) coords[i].insert(coords[i].end(), row, row + 2);  // 3 numbers of up to 8 bytes
    }
    inputs[i] = {coords[i].data(), data[i].data(), rows, nullptr, nullptr};
  }
  if (vxm_engine_run(engine, inputs.data(), info.inputs, nullptr) != VXM_OK) return;
  if (vxm_engine_status(engine, nullptr) != VXM_OK) return;
  for (int32_t i = 0; i < info.outputs; ++i) {
    vxm_output_info of;
    vxm_output out;
    if (vxm_engine_output_info(engine, i, &of) != VXM_OK || vxm_engine_output(engine, i, &out) != VXM_OK)
      fail("no output", how);
    int64_t count = 1;
    for (int32_t d = 0; d < of.dims; ++d) count *= of.shape[d];
    Bytes made(static_cast<size_t>(count) * vxm_dtype_size(of.dtype));
    std::vector<int32_t> where(of.kind == VXM_VOXELS ? static_cast<size_t>(4 * of.shape[0]) : 0);
    vxm_engine_read(engine, i, of.kind == VXM_VOXELS ? where.data() : nullptr, made.data());
  }
}

void attempt(const Bytes& content, size_t size, bool refused, const std::string& how, int blocks = 2) {
  {
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(size));
  }
  vxm_options options;
  vxm_options_init(&options);
  options.allocator = {&blocks, allocate, release};
  vxm_engine* engine = nullptr;
  const vxm_code code = vxm_engine_load(path.c_str(), &options, &engine);
  ++seen[code];
  if ((code == VXM_OK) != (engine != nullptr)) fail("an engine and a code do not fit", how);
  if (code == VXM_ERROR_INTERNAL || (code != VXM_OK && vxm_last_error()[0] == '\0')) fail("no sentence", how);
  if (code == VXM_OK) {
    if (refused) fail("was let pass", how);
    run_frame(engine, how);
  }
  vxm_engine_free(engine);
}

void put32(Bytes& content, size_t at, uint32_t value) {
  for (size_t i = 0; i < 4; ++i) content[at + i] = static_cast<unsigned char>(value >> (8 * i));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const Bytes good((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  path = std::string(argv[2]) + "/fuzzed.engine";
  const int rounds = std::atoi(argv[3]);
  uint64_t head = 0;
  std::memcpy(&head, good.data() + 24, 8);
  attempt(good, good.size(), false, "the engine itself");
  if (seen[VXM_OK] != 1) fail("is refused", "the engine itself");
  for (int blocks = 0; blocks < 2; ++blocks) attempt(good, good.size(), true, "out of memory", blocks);
  if (seen[VXM_ERROR_MEMORY] != 2) fail("memory that is not there", "out of memory");

  for (size_t size = 0; size < good.size(); size += 4096) attempt(good, size, true, "cut at " + std::to_string(size));
  for (size_t size = 0; size < 80; ++size) attempt(good, size, true, "cut at " + std::to_string(size));
  Bytes longer = good;
  longer.push_back(0);
  attempt(longer, longer.size(), true, "one byte more");

  std::mt19937_64 random(1);
  for (int i = 0; i < rounds; ++i) {
    Bytes bad = good;
    const size_t at = i < 64 ? i % 32 : random() % good.size();
    bad[at] ^= static_cast<unsigned char>(1 + random() % 255);
    attempt(bad, bad.size(), true, "byte " + std::to_string(at) + " is another");
  }
  const char digits[] = "0123456789-,[]{}\":truefalsn";
  for (int i = 0; i < 3 * rounds; ++i) {
    Bytes bad = good;
    std::string how = "round " + std::to_string(i) + ", bytes";
    for (uint64_t many = 1 + random() % 3; many > 0; --many) {
      size_t at = 32 + random() % head;
      if (i % 3 == 0) {  // a digit of a number: mostly still JSON
        for (size_t tries = 0; tries < head && (bad[at] < '0' || bad[at] > '9'); ++tries) at = 32 + (at - 31) % head;
        bad[at] = static_cast<unsigned char>('0' + random() % 10);
      } else if (i % 3 == 1) {
        bad[at] = static_cast<unsigned char>(digits[random() % (sizeof(digits) - 1)]);
      } else {
        at = 16 + random() % (good.size() - 16);
        bad[at] = static_cast<unsigned char>(random());
      }
      how += " " + std::to_string(at);
    }
    put32(bad, 12, vxm::crc32(bad.data() + 16, bad.size() - 16));
    attempt(bad, bad.size(), false, how);
  }
  std::remove(path.c_str());
  for (const auto& [code, count] : seen) std::printf("%s %d\n", vxm_code_name(code), count);
  return 0;
}
