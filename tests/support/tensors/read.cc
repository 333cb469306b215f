// Reads a tensor from the file named first, by libarrow's own IPC reader, and writes it to the one named second as a
// dense one. The third argument is "dense" or "sparse".
#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>
#include <arrow/sparse_tensor.h>
#include <arrow/tensor.h>
#include <arrow/util/logging.h>

#include <string>

using namespace arrow;

int main(int, char** arguments) {
  auto file = io::ReadableFile::Open(arguments[1]).ValueOrDie();
  auto whole = file->ReadAt(0, file->GetSize().ValueOrDie()).ValueOrDie();
  io::BufferReader source(whole);
  std::shared_ptr<Tensor> tensor;
  if (arguments[3] == std::string("dense")) {
    tensor = ipc::ReadTensor(&source).ValueOrDie();
  } else {
    tensor = ipc::ReadSparseTensor(&source).ValueOrDie()->ToTensor().ValueOrDie();
  }
  auto sink = io::FileOutputStream::Open(arguments[2]).ValueOrDie();
  int32_t metadata;
  int64_t body;
  ARROW_CHECK_OK(ipc::WriteTensor(*tensor, sink.get(), &metadata, &body));
}
