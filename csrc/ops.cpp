// Operator schemas, nothing else. flash_allreduce_plugin/codec/ops.py documents and wraps them.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flash_allreduce, m) {
  m.def(
      "encode(Tensor input, Tensor(a!) payload, int bits, int group_size, int options, int key=0, "
      "int first_group=0, int groups_a_row=0) -> ()");
  m.def("decode(Tensor payload, Tensor(a!) output, int bits, int group_size, int options) -> ()");
  m.def(
      "decode_sum(Tensor payloads, Tensor(a!) output, float factor, int bits, int group_size, "
      "int options) -> ()");
  m.def(
      "decode_sum_encode(Tensor payloads, Tensor(a!) payload, float factor, int reduce_bits, "
      "int gather_bits, int group_size, int options, int key=0, int first_group=0) -> ()");
  m.def(
      "encode_feedback(Tensor input, Tensor(a!) payload, Tensor(b!) residual, float momentum, int bits, "
      "int group_size, int options, int key=0, int first_group=0) -> ()");
  m.def(
      "decode_sum_encode_feedback(Tensor payloads, Tensor(a!) payload, Tensor(b!) residual, float factor, "
      "float momentum, int reduce_bits, int gather_bits, int group_size, int options, int key=0, "
      "int first_group=0) -> ()");
  m.def(
      "encode_difference(Tensor master, Tensor held, Tensor(a!) payload, int bits, int group_size, "
      "int options, int key=0, int first_group=0) -> bool");
  m.def("decode_add(Tensor payload, Tensor(a!) held, int bits, int group_size, int options) -> ()");
  m.def("payload_bytes(int numel, int bits, int group_size, int options) -> int");
  m.def("wire_version() -> int");
  m.def("cpu_capability() -> str");
}
