"""What is learned, as tasks of timm: every attention by itself, then the network as a whole."""

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.task import FeatureDistillationTask, TrainingTask
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import unwrap_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .layers import LayerErrors, relative_error

__all__ = ['Agreement', 'AgreementEvaluator', 'ErrorEvaluator', 'LayersTask', 'NetworkTask']


class ErrorEvaluator:
    """Means over the images of what `LayerErrors` gives, and as the loss their mean; as timm's evaluators are used."""

    def __init__(self, names: list[str], device: torch.device, max_samples: int | None = None):
        """
        Args:
            names: Of the layers.
            device: Where their errors are.
            max_samples: Images to count, of those that come.
        """
        self.names = names
        self.metric_names = ('loss', *names)
        self.max_samples = max_samples
        self.num_samples = 0
        dtype = torch.float32 if device.type == 'mps' else torch.float64  # which MPS does not have
        self.sums = torch.zeros(len(names) + 1, dtype=dtype, device=device)  # the last counts images

    def update(self, errors: torch.Tensor, target: torch.Tensor) -> None:
        """Count the errors (B, layers) of a batch; there is no target but the teacher."""
        if self.max_samples is not None:
            errors = errors[: max(self.max_samples - self.num_samples, 0)]
        self.num_samples += len(errors)
        self.sums[:-1] += errors.to(self.sums.dtype).sum(0)
        self.sums[-1] += len(errors)

    def summary(self) -> OrderedDict[str, float]:
        """The means of this process so far."""
        return self._means(self.sums)

    def compute(self, distributed: bool = False) -> OrderedDict[str, float]:
        """The means, with `distributed` over the images of all processes."""
        sums = self.sums.clone()
        if distributed:
            dist.all_reduce(sums)
        return self._means(sums)

    def _means(self, sums: torch.Tensor) -> OrderedDict[str, float]:
        means = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        return OrderedDict(loss=sum(means) / len(means), **dict(zip(self.names, means, strict=True)))


class LayersTask(TrainingTask):
    """Every converted attention learns what the teacher's own gives for the same input; see `LayerErrors`."""

    def __init__(self, teacher: nn.Module, student: nn.Module, device: torch.device):
        """
        Args:
            teacher: The network as it was trained.
            student: The same with other attention.
            device: Where they are.
        """
        super().__init__(device=device, verbose=False)
        self.trainable_module: nn.Module = LayerErrors(teacher, student)

    def prepare_distributed(self, device_ids: list | None = None, **kwargs: Any) -> 'LayersTask':
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **kwargs)
        return self

    def get_checkpoint_state(self, ema: bool = False, unwrap_fn=unwrap_model) -> dict[str, Any]:
        return {} if ema else {'state_dict': unwrap_fn(self.trainable_module).student.state_dict()}

    def create_evaluator(self, **kwargs: Any) -> ErrorEvaluator:
        return ErrorEvaluator(unwrap_model(self.trainable_module).names, self.device, **kwargs)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {'loss': self.trainable_module(input).mean()}


class Agreement(nn.Module):
    """Maps images to the class scores of student and teacher (B, 2, classes), of those without any to their features'
    relative squared error (B, 1)."""

    def __init__(self, teacher: nn.Module, student: nn.Module):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        student, teacher = self.student(images), self.teacher(images)
        if self.teacher.num_classes:
            return torch.stack([student, teacher], dim=1)
        return relative_error(student, teacher).unsqueeze(1)

    def evaluator(self, device: torch.device, **kwargs: Any) -> 'AgreementEvaluator | ErrorEvaluator':
        """An evaluator of what this gives."""
        if self.teacher.num_classes:
            return AgreementEvaluator(device, **kwargs)
        return ErrorEvaluator(['features'], device, **kwargs)


class AgreementEvaluator(ClassificationEvaluator):
    """Accuracy where the right class is the one that the teacher finds, whatever the label."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count the class scores (B, 2, classes) of student and teacher."""
        super().update(output[:, 0], output[:, 1].argmax(-1))


class NetworkTask(FeatureDistillationTask):
    """The whole student learns the teacher's pooled features and class scores, and labels where they count.

    timm's tasks have either features or scores, always with labels; this has all from one pass of each network. The
    loss is the features' relative squared error, plus the scores' Kullback-Leibler divergence at a temperature T, times
    T² (arXiv 1503.02531), plus the labels' cross-entropy times its weight.
    """

    def __init__(
        self, teacher: nn.Module, student: nn.Module, device: torch.device, temperature: float, label_weight: float
    ):
        """
        Args:
            teacher: The network as it was trained.
            student: The same with other attention.
            device: Where they are.
            temperature: T.
            label_weight: Weight of the cross-entropy; 0 leaves labels out.
        """
        super().__init__(student, teacher, task_loss_weight=label_weight, device=device, verbose=False)
        self.temperature = temperature
        self.agreement = self.eval_model = Agreement(teacher, student)  # timm looks for the latter

    def get_checkpoint_state(self, ema: bool = False, unwrap_fn=unwrap_model) -> dict[str, Any]:
        return {} if ema else {'state_dict': self.agreement.student.state_dict()}

    def create_evaluator(self, **kwargs: Any) -> AgreementEvaluator | ErrorEvaluator:
        return self.agreement.evaluator(self.device, **kwargs)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        scores, features = self.trainable_module(input)
        teacher = self.teacher.model
        with torch.no_grad():
            maps = teacher.forward_features(input)
            teacher_scores, teacher_features = teacher.forward_head(maps), teacher.forward_head(maps, pre_logits=True)
        loss = relative_error(features, teacher_features).mean()
        if teacher.num_classes:
            ours, theirs = (F.log_softmax(x.float() / self.temperature, dim=-1) for x in (scores, teacher_scores))
            loss = loss + F.kl_div(ours, theirs, reduction='batchmean', log_target=True) * self.temperature**2
        if self.task_loss_weight:
            loss = loss + self.task_loss_weight * self.criterion(scores, target)
        return {'loss': loss, 'output': scores}
