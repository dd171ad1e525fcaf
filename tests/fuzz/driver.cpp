// What runs a fuzz target where the compiler has no libFuzzer: the corpus, then mutations of it, the same for
// the same -seed. It takes libFuzzer's flags: TARGET [-runs=N] [-max_total_time=SECONDS] [-seed=N]
// [-artifact_prefix=P] CORPUS... and a file in place of a folder is run alone. An input with a finding is
// written to Pcrash-SEED.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kMostBytes = 512;

Bytes current;
std::string crash_file;

void keep_current() {
  std::ofstream(crash_file, std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), static_cast<std::streamsize>(current.size()));
  std::fprintf(stderr, "the input is in %s\n", crash_file.c_str());
}

Bytes read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

class Mutator {
 public:
  Mutator(uint64_t seed, const std::vector<Bytes>& corpus) : random_(seed), corpus_(corpus) {}

  Bytes next() {
    Bytes x;
    if (below(8) == 0) {  // any bytes
      x.resize(below(kMostBytes));
      for (uint8_t& byte : x) byte = static_cast<uint8_t>(random_());
      return x;
    }
    x = corpus_[below(corpus_.size())];
    for (size_t i = below(8); i-- > 0;) change(x);
    if (x.size() > kMostBytes) x.resize(kMostBytes);
    return x;
  }

 private:
  size_t below(size_t end) { return end == 0 ? 0 : random_() % end; }

  void change(Bytes& x) {
    // Float32, bf16 and fp16 that are hard on a codec: NaN, Inf, the largest, subnormal, -0.
    static const uint32_t hard[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f7fffff, 0x00000001, 0x80000000,
                                    0x7c007c00, 0x7e007e00, 0x7bff7bff, 0x00010001, 0xffffffff, 0x7f807f80};
    const size_t at = below(x.size());
    const auto from = x.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(7)) {
      case 0:  // a bit
        if (!x.empty()) x[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:  // a byte
        if (!x.empty()) x[at] = static_cast<uint8_t>(random_());
        break;
      case 2:  // a hard number
        for (size_t i = 0; i < 4 && at + i < x.size(); ++i) {
          x[at + i] = static_cast<uint8_t>(hard[below(std::size(hard))] >> (8 * i));
        }
        break;
      case 3:  // cut off
        x.resize(at);
        break;
      case 4:  // some bytes out
        x.erase(from, from + static_cast<std::ptrdiff_t>(below(std::min<size_t>(x.size() - at, 8) + 1)));
        break;
      case 5:  // some in
        for (size_t i = below(16); i-- > 0;) x.push_back(static_cast<uint8_t>(random_()));
        break;
      default: {  // the end of another
        const Bytes& other = corpus_[below(corpus_.size())];
        x.resize(at);
        x.insert(x.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())), other.end());
      }
    }
  }

  std::mt19937_64 random_;
  const std::vector<Bytes>& corpus_;
};

}  // namespace

int main(int count, char** words) {
  uint64_t runs = 0, seed = 1;
  double seconds = 0;
  std::string prefix;
  std::vector<Bytes> corpus;
  bool folders = false;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const std::string value = word.substr(word.find('=') + 1);
    if (word.rfind("-runs=", 0) == 0) {
      runs = std::stoull(value);
    } else if (word.rfind("-max_total_time=", 0) == 0) {
      seconds = std::stod(value);
    } else if (word.rfind("-seed=", 0) == 0) {
      seed = std::stoull(value);
    } else if (word.rfind("-artifact_prefix=", 0) == 0) {
      prefix = value;
    } else if (word[0] == '-') {
      continue;  // libFuzzer has more
    } else if (std::filesystem::is_directory(word)) {
      folders = true;
      std::vector<std::filesystem::path> files;
      for (const auto& entry : std::filesystem::directory_iterator(word)) files.push_back(entry.path());
      std::sort(files.begin(), files.end());
      for (const auto& file : files) corpus.push_back(read(file));
    } else {
      corpus.push_back(read(word));
    }
  }
  crash_file = prefix + "crash-" + std::to_string(seed);
  __sanitizer_set_death_callback(keep_current);
  const auto began = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  uint64_t done = 0;
  const auto run = [&] {
    LLVMFuzzerTestOneInput(current.data(), current.size());
    ++done;
  };
  corpus.emplace_back();
  for (const Bytes& one : corpus) {
    current = one;
    run();
  }
  Mutator mutator(seed, corpus);
  while (folders && (runs == 0 || done < runs) && (seconds == 0 || done % 256 != 0 || elapsed() < seconds)) {
    current = mutator.next();
    run();
  }
  std::printf("stat::number_of_executed_units: %llu\n", static_cast<unsigned long long>(done));
  std::printf("stat::average_exec_per_sec: %.0f\n", static_cast<double>(done) / elapsed());
  return 0;
}
