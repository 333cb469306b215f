// Reads tensors by libarrow's own IPC reader, and writes them as dense ones. The arguments are in threes: the file to
// read, the file to write, and "dense" or "sparse".
#include <arrow/io/file.h>
#include <arrow/io/memory.h>
#include <arrow/ipc/reader.h>
#include <arrow/ipc/writer.h>
#include <arrow/sparse_tensor.h>
#include <arrow/tensor.h>
#include <arrow/util/logging.h>

#include <string>

using namespace arrow;

void convert(const char* from, const char* to, const std::string& kind) {
  auto file = io::ReadableFile::Open(from).ValueOrDie();
  auto whole = file->ReadAt(0, file->GetSize().ValueOrDie()).ValueOrDie();
  io::BufferReader source(whole);
  std::shared_ptr<Tensor> tensor;
  if (kind == "dense") {
    tensor = ipc::ReadTensor(&source).ValueOrDie();
  } else {
    tensor = ipc::ReadSparseTensor(&source).ValueOrDie()->ToTensor().ValueOrDie();
  }
  auto sink = io::FileOutputStream::Open(to).ValueOrDie();
  int32_t metadata;
  int64_t body;
  ARROW_CHECK_OK(ipc::WriteTensor(*tensor, sink.get(), &metadata, &body));
}

int main(int count, char** arguments) {
  for (int at = 1; at + 2 < count; at += 3) convert(arguments[at], arguments[at + 1], arguments[at + 2]);
}
