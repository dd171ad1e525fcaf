import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.autograd import Variable
from torch.nn import Module


def apply_flat_dist_call(bucket, call, extra_args=None):
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.copy_(synced)


def by_dtype(tensors):
    return [[t for t in tensors if t.dtype is dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]


def flat_dist_call(tensors, call, extra_args=None):
    for bucket in by_dtype(tensors):
        apply_flat_dist_call(bucket, call, extra_args)


class Reducer:
    def __init__(self, module_or_grads_list):
        self.module = module_or_grads_list if isinstance(module_or_grads_list, Module) else None
        if self.module:
            flat_dist_call([p.data for p in self.module.parameters()], dist.broadcast, (0,))
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self):
        if self.module:
            grads = [p.grad.data for p in self.module.parameters() if p.grad is not None]
            flat_dist_call(grads, dist.all_reduce)
        else:
            flat_dist_call(self.grads, dist.all_reduce)


class DistributedDataParallel(Module):
    def __init__(
        self,
        module,
        message_size=10000000,
        delay_allreduce=False,
        shared_param=None,
        allreduce_trigger_params=None,
        retain_allreduce_buffers=False,
        allreduce_always_fp32=False,
        num_allreduce_streams=1,
        allreduce_communicators=None,
        gradient_average=True,
        gradient_predivide_factor=1.0,
        gradient_average_split_factor=None,
        prof=False,
    ):
        super().__init__()
        self.module = module
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.triggers = None if allreduce_trigger_params is None else {id(p) for p in allreduce_trigger_params}
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.allreduce_different_streams = num_allreduce_streams > 1
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.world_size = float(dist.get_world_size())
        self.bucket_pgs = allreduce_communicators[0] if allreduce_communicators else []
        self.bucket_of = None  # parameter's id -> bucket; None: to be settled by the next backward pass
        self._disable_allreduce = False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.allreduce_hook)
        flat_dist_call([p.data for p in module.parameters()], dist.broadcast, (0,))

    def enable_allreduce(self):
        self._disable_allreduce = False

    def disable_allreduce(self):
        self._disable_allreduce = True

    def forward(self, *inputs, **kwargs):
        result = self.module(*inputs, **kwargs)
        if not self._disable_allreduce:
            if self.bucket_of is not None and self.allreduce_different_streams and not self.bucket_pgs:
                self.bucket_pgs = [dist.new_group() for _ in range(self.num_allreduce_streams)]
            self.callback_queued, self.arrived, self.next_bucket = False, [], 0
        return result

    def allreduce_hook(self, param):
        if self._disable_allreduce:
            return
        if not self.callback_queued:
            Variable._execution_engine.queue_callback(self.end_of_backward)
            self.callback_queued = True
        self.arrived.append(param)
        if self.bucket_of is not None:
            self.comm_ready_buckets(param)

    def end_of_backward(self):
        if self.bucket_of is not None:
            assert self.next_bucket == self.num_buckets
            return
        if not self.delay_allreduce:
            self.settle_buckets()
        self.allreduce_fallback()

    def settle_buckets(self):
        """Settle in the order of arrival, one dtype after the other. All ranks share it here; apex uses rank 0's."""
        buckets, filling = [], {}
        for param in self.arrived:
            bucket = filling.setdefault(param.dtype, [])
            bucket.append(param)
            full = sum(p.numel() for p in bucket) >= self.message_size
            if full if self.triggers is None else id(param) in self.triggers:
                buckets.append(filling.pop(param.dtype))
        buckets += filling.values()
        self.bucket_of = {id(p): index for index, bucket in enumerate(buckets) for p in bucket}
        self.num_buckets = len(buckets)

    def comm_ready_buckets(self, param):
        while self.next_bucket < self.num_buckets:
            bucket = [p for p in self.arrived if self.bucket_of[id(p)] == self.next_bucket]
            if len(bucket) < list(self.bucket_of.values()).count(self.next_bucket):
                break
            self.allreduce_maybe_retain([p.grad.data for p in bucket], self.next_bucket)
            self.next_bucket += 1

    def allreduce_fallback(self):
        grads = [p.grad.data for p in self.module.parameters() if p.grad is not None]
        for index, bucket in enumerate(by_dtype(grads)):
            self.allreduce_maybe_retain(bucket, index, force_default_stream=True)

    def allreduce_maybe_retain(self, bucket, bucket_idx, force_default_stream=False):
        allreduced = self.allreduce_bucket(bucket, bucket_idx, force_default_stream)
        if self.retain_allreduce_buffers:
            for view, grad in zip(unflatten(allreduced, bucket), bucket, strict=True):
                grad.copy_(view)  # apex makes the gradient a view of the bucket

    def allreduce_bucket(self, bucket, bucket_idx, force_default_stream):
        tensor = flatten(bucket)
        reduced = tensor.float() if self.allreduce_always_fp32 else tensor
        if self.gradient_predivide_factor != 1.0:
            reduced.mul_(1.0 / self.gradient_predivide_factor)
        if self.allreduce_different_streams and not force_default_stream:
            dist.all_reduce(reduced, group=self.bucket_pgs[bucket_idx % self.num_allreduce_streams])
        else:
            dist.all_reduce(reduced)
        if self.gradient_average:
            reduced.mul_(self.gradient_predivide_factor / self.world_size)
        if reduced is not tensor:
            tensor.copy_(reduced)
        if not self.retain_allreduce_buffers:
            for grad, synced in zip(bucket, unflatten(tensor, bucket), strict=True):
                grad.copy_(synced)
        return tensor
