// Makes the FFI calls that a file describes, on many threads at once, each on one of the fake
// driver's devices: `replay LIBCUDA CALLS THREADS ROUNDS`. tests/host/test_replay.py writes the
// file.
//
// Every thread runs both stages of every call. The order of the calls differs between threads. All
// devices are equal, so all threads must get the same answers. This is a program without Python, so
// that sanitizers see only the handlers: no lock of Python orders the threads, and no leak is
// Python's.

#include <dlfcn.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/stages.h"

namespace {

// An answer is 0 or the code of an error.
using Answers = std::vector<int>;

struct Handlers {
  XLA_FFI_Handler *initialize, *execute;
};

const std::map<std::string, Handlers> kHandlers = {
    {"packax_documents_v1", {packax_documents_initialize, packax_documents_execute}},
    {"packax_blocks_v1", {packax_blocks_initialize, packax_blocks_execute}},
    {"packax_forward_v1", {packax_forward_initialize, packax_forward_execute}},
    {"packax_backward_v1", {packax_backward_initialize, packax_backward_execute}},
    {"packax_decode_v1", {packax_decode_initialize, packax_decode_execute}},
    {"packax_forward_tangent_v1",
     {packax_forward_tangent_initialize, packax_forward_tangent_execute}},
};

[[noreturn]] void Fail(const std::string& text) {
  std::fprintf(stderr, "replay: %s\n", text.c_str());
  std::exit(1);
}

// XLA's side of a call, as in call_frame.py.

struct Error {
  int code;
  std::string message;
};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  auto* error = new Error{static_cast<int>(args->errc), args->message};
  return reinterpret_cast<XLA_FFI_Error*>(error);
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(0xABC0);
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Stream_Get = GetStream;
  return api;
}

// One call. The structs that XLA would pass point into the members, so it cannot be copied.
class Call {
 public:
  Call(const Handlers& handlers, const XLA_FFI_Api* api) : handlers_(handlers), api_(api) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void AddArray(bool result, int dtype, uintptr_t address, std::vector<int64_t> sizes) {
    Array& array = *(result ? results_ : operands_).emplace_back(std::make_unique<Array>());
    array.sizes = std::move(sizes);
    array.buffer = {XLA_FFI_Buffer_STRUCT_SIZE,
                    nullptr,
                    static_cast<XLA_FFI_DataType>(dtype),
                    reinterpret_cast<void*>(address),
                    static_cast<int64_t>(array.sizes.size()),
                    array.sizes.data()};
  }

  // dtype 0: a string.
  void AddAttribute(const std::string& name, int dtype, std::string bytes) {
    Attribute& attribute = *attributes_.emplace_back(std::make_unique<Attribute>());
    attribute.name = name;
    attribute.bytes = std::move(bytes);
    attribute.name_span = {attribute.name.data(), attribute.name.size()};
    attribute.text = {attribute.bytes.data(), attribute.bytes.size()};
    attribute.scalar = {static_cast<XLA_FFI_DataType>(dtype), attribute.bytes.data()};
    attribute.is_text = dtype == 0;
  }

  int Run(XLA_FFI_ExecutionStage stage) const {
    Pointers operands(operands_), results(results_);
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;
    for (const auto& a : attributes_) {
      types.push_back(a->is_text ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR);
      names.push_back(&a->name_span);
      values.push_back(a->is_text ? static_cast<void*>(&a->text) : &a->scalar);
    }
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = api_;
    frame.stage = stage;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands.size(), operands.arg_types.data(),
                  operands.buffers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results.size(), results.ret_types.data(),
                  results.buffers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                   nullptr,
                   static_cast<int64_t>(types.size()),
                   types.data(),
                   names.data(),
                   values.data()};
    const bool executes = stage == XLA_FFI_ExecutionStage_EXECUTE;
    XLA_FFI_Error* failed = (executes ? handlers_.execute : handlers_.initialize)(&frame);
    if (failed == nullptr) return 0;
    const std::unique_ptr<Error> error(reinterpret_cast<Error*>(failed));
    if (error->code == 0 || error->message.empty()) Fail("an error without a code or a text");
    return error->code;
  }

 private:
  struct Array {
    std::vector<int64_t> sizes;
    XLA_FFI_Buffer buffer;
  };
  struct Attribute {
    std::string name, bytes;
    XLA_FFI_ByteSpan name_span, text;
    XLA_FFI_Scalar scalar;
    bool is_text;
  };
  using Arrays = std::vector<std::unique_ptr<Array>>;
  struct Pointers {
    explicit Pointers(const Arrays& arrays)
        : arg_types(arrays.size(), XLA_FFI_ArgType_BUFFER),
          ret_types(arrays.size(), XLA_FFI_RetType_BUFFER) {
      for (const auto& array : arrays) buffers.push_back(&array->buffer);
    }
    int64_t size() const { return static_cast<int64_t>(buffers.size()); }

    std::vector<XLA_FFI_ArgType> arg_types;
    std::vector<XLA_FFI_RetType> ret_types;
    std::vector<void*> buffers;
  };

  Handlers handlers_;
  const XLA_FFI_Api* api_;
  Arrays operands_, results_;
  std::vector<std::unique_ptr<Attribute>> attributes_;
};

template <typename Function>
Function* Symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) Fail(std::string("the driver has no ") + name);
  return reinterpret_cast<Function*>(found);
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 1; i + 1 < hex.size(); i += 2) {  // after the leading "x"
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// Sets up the fake driver and reads the calls. The lines of the file are:
//   device CC; layout KERNEL TYPES; call TARGET
//   operand|result DTYPE ADDRESS RANK SIZES...; attribute NAME DTYPE xBYTES (of the last call)
std::vector<std::unique_ptr<Call>> Read(const char* path, void* cuda, const XLA_FFI_Api* api) {
  auto* add_device = Symbol<void(const char*, int, int)>(cuda, "fake_add_device");
  auto* set_layout = Symbol<void(const char*, const char*)>(cuda, "fake_set_layout");
  std::vector<std::unique_ptr<Call>> calls;
  std::ifstream in(path);
  std::string word, text, bytes;
  while (in >> word) {
    if (word == "device") {
      int cc = 0;
      in >> cc;
      add_device("Fake GPU", cc, 232448);
    } else if (word == "layout") {
      in >> text >> bytes;
      set_layout(text.c_str(), bytes.c_str());
    } else if (word == "call") {
      in >> text;
      calls.push_back(std::make_unique<Call>(kHandlers.at(text), api));
    } else if (word == "operand" || word == "result") {
      int dtype = 0;
      uintptr_t address = 0;
      size_t rank = 0;
      in >> dtype >> address >> rank;
      std::vector<int64_t> sizes(rank);
      for (int64_t& size : sizes) in >> size;
      calls.back()->AddArray(word == "result", dtype, address, std::move(sizes));
    } else if (word == "attribute") {
      int dtype = 0;
      in >> text >> dtype >> bytes;
      calls.back()->AddAttribute(text, dtype, FromHex(bytes));
    } else {
      Fail("no line begins with " + word);
    }
    if (!in) Fail("a line ends too early: " + word);
  }
  return calls;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) Fail("usage: replay LIBCUDA CALLS THREADS ROUNDS");
  setenv("PACKAX_LIBCUDA", argv[1], 1);
  void* cuda = dlopen(argv[1], RTLD_NOW);
  if (cuda == nullptr) Fail(dlerror());
  const XLA_FFI_Api api = MakeApi();
  const auto calls = Read(argv[2], cuda, &api);
  const int threads = std::atoi(argv[3]), rounds = std::atoi(argv[4]);
  if (calls.empty() || threads < 1) Fail("no calls, or no threads");
  auto* set_current = Symbol<void(int)>(cuda, "fake_set_current");

  std::vector<Answers> answers(threads, Answers(2 * calls.size()));
  std::barrier together(threads);
  const auto work = [&](int number) {
    set_current(number % 4);
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < calls.size(); ++i) {
        // Half of the threads of each device start with the second half of the calls.
        const size_t at = (i + (number / 4 % 2) * calls.size() / 2) % calls.size();
        if (round == 0) together.arrive_and_wait();  // kernels are loaded in this round
        answers[number][2 * at] = calls[at]->Run(XLA_FFI_ExecutionStage_INITIALIZE);
        answers[number][2 * at + 1] = calls[at]->Run(XLA_FFI_ExecutionStage_EXECUTE);
      }
    }
  };
  std::vector<std::thread> running;
  running.reserve(threads);
  for (int i = 0; i < threads; ++i) running.emplace_back(work, i);
  for (std::thread& thread : running) thread.join();

  size_t accepted = 0;
  for (const Answers& other : answers) {
    if (other != answers[0]) Fail("threads got different answers");
  }
  for (size_t i = 1; i < answers[0].size(); i += 2) accepted += answers[0][i] == 0;
  std::printf("%zu calls, %zu accepted, %d threads\n", calls.size(), accepted, threads);
  return 0;
}
