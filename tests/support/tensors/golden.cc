// Writes the golden tensors beside this file, by libarrow 26.0.1's own IPC writer:
//
//   P=$(python -c 'import pyarrow; print(*pyarrow.get_library_dirs())')
//   g++ -std=c++20 -w -I$P/include golden.cc -L$P -l:libarrow.so.2600 -Wl,-rpath,$P -o /tmp/golden && /tmp/golden .
#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>
#include <arrow/sparse_tensor.h>
#include <arrow/tensor.h>
#include <arrow/util/logging.h>

#include <string>

using namespace arrow;

std::string directory;

void save(const std::string& name, const Buffer& content) {
  auto file = io::FileOutputStream::Open(directory + "/" + name + ".bin").ValueOrDie();
  ARROW_CHECK_OK(file->Write(content.data(), content.size()));
}

void dense(const std::string& name, const Tensor& tensor) {
  auto sink = io::BufferOutputStream::Create().ValueOrDie();
  int32_t metadata;
  int64_t body;
  ARROW_CHECK_OK(ipc::WriteTensor(tensor, sink.get(), &metadata, &body));
  save(name, *sink->Finish().ValueOrDie());
}

void sparse(const std::string& name, const SparseTensor& tensor) {
  auto sink = io::BufferOutputStream::Create().ValueOrDie();
  int32_t metadata;
  int64_t body;
  ARROW_CHECK_OK(ipc::WriteSparseTensor(tensor, sink.get(), &metadata, &body));
  save(name, *sink->Finish().ValueOrDie());
}

int main(int, char** arguments) {
  directory = arguments[1];
  std::vector<int64_t> values(24, 0);
  values[1] = 1, values[5] = 2, values[13] = 3, values[14] = 4, values[23] = 5;
  auto data = Buffer::FromVector(values);
  Tensor cube(int64(), data, {2, 3, 4}, {}, {"a", "b", "c"});
  Tensor matrix(int64(), data, {4, 6}, {}, {"row", "column"});
  Tensor bytes(int8(), Buffer::FromVector(std::vector<int8_t>{0, 9, 0, 0, 0, 8, 7, 0, 0}), {3, 3});
  Tensor zeros(float64(), Buffer::FromVector(std::vector<double>(6, 0)), {2, 3});
  dense("dense", matrix);
  dense("dense_column_major", Tensor(int64(), data, {4, 6}, {8, 32}));
  dense("dense_strided", Tensor(int64(), data, {2, 3}, {96, 16}, {"x", "y"}));
  dense("dense_0d", Tensor(int64(), Buffer::FromVector(std::vector<int64_t>{7}), {}));
  dense("dense_empty", Tensor(float64(), Buffer::FromVector(std::vector<double>{}), {0, 3}));
  dense("dense_half", Tensor(float16(), Buffer::FromVector(std::vector<uint16_t>{0x3c00, 0xc000, 0x7bff}), {3}));
  for (const auto& index : {int64(), int32(), uint8()}) {
    auto suffix = "_" + index->ToString();
    sparse("coo" + suffix, *SparseCOOTensor::Make(cube, index).ValueOrDie());
    sparse("csr" + suffix, *SparseCSRMatrix::Make(matrix, index).ValueOrDie());
    sparse("csc" + suffix, *SparseCSCMatrix::Make(matrix, index).ValueOrDie());
    sparse("csf" + suffix, *SparseCSFTensor::Make(cube, index).ValueOrDie());
  }
  sparse("coo_bytes", *SparseCOOTensor::Make(bytes, int64()).ValueOrDie());
  sparse("csr_bytes", *SparseCSRMatrix::Make(bytes, int64()).ValueOrDie());
  sparse("csc_bytes", *SparseCSCMatrix::Make(bytes, int64()).ValueOrDie());
  sparse("csf_bytes", *SparseCSFTensor::Make(bytes, int64()).ValueOrDie());
  sparse("coo_none", *SparseCOOTensor::Make(zeros, int64()).ValueOrDie());
  sparse("csr_none", *SparseCSRMatrix::Make(zeros, int64()).ValueOrDie());
  sparse("csc_none", *SparseCSCMatrix::Make(zeros, int64()).ValueOrDie());
  sparse("csf_none", *SparseCSFTensor::Make(zeros, int64()).ValueOrDie());
}
