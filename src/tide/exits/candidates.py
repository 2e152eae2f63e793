"""Candidates: the exit head read for a few tokens only, to reject most tokens without all of it.

Candidates are the tokens that n-grams predict and those that the model predicts most often. That a
few candidates tell whether to read the head is an idea of Xu et al., "SpecEE", 2025; theirs are the
tokens of a draft model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tide.errors import UnsupportedModelError
from tide.exits.confidence import ConfidenceModel
from tide.exits.heads import Readout
from tide.kernels.arguments import Candidates, Head
from tide.kernels.arithmetic import candidate_features
from tide.models.runner import logit_scales


class CandidateReadout:
    """Reads states for the candidates.

    Args:
        readout: of the exit head.
        tokens: ids of the candidates of every state, `[c]`, at least 2, all in its vocabulary.
    """

    def __init__(self, readout: Readout, tokens: Tensor) -> None:
        weight, bias = readout.linear_head()
        if weight is None:
            raise UnsupportedModelError(
                "The head cannot be read in part: it is packed, offloaded or hooked. Calibrate "
                "with a reduced vocabulary, or calibrate this model as it is."
            )
        self.head = Head(weight, bias, *logit_scales(readout.config))
        vocabulary, device = readout.vocabulary, weight.device
        if vocabulary is None:
            vocabulary = torch.arange(readout.size, device=device)
        places = torch.full((readout.size + 1,), -1, device=device)
        places[vocabulary] = torch.arange(len(vocabulary), device=device)
        some = places[tokens.to(device)]
        fixed_bias = None if bias is None else bias.detach()[some]
        self.arguments = Candidates(weight.detach()[some].contiguous(), fixed_bias, places)

    def features(self, states: Tensor, ngrams: Tensor) -> Tensor:
        """The feature "candidates" of a confidence model; see `candidate_features`.

        Args:
            states: normed, `[n, hidden]`.
            ngrams: what n-grams predict, `[n, 4]`; see `gather_features`.
        """
        device = self.head.head.device
        return candidate_features(states.to(device), ngrams.to(device), self.head, self.arguments)


class Prefilter(nn.Module):
    """Rejects tokens by their candidates, before the exit head is read.

    Args:
        model: from the feature "candidates" to the chance that the exit is correct.
        candidates: reads them.
    """

    def __init__(self, model: ConfidenceModel, candidates: CandidateReadout) -> None:
        super().__init__()
        self.model, self.candidates = model, candidates

    def forward(self, states: Tensor, ngrams: Tensor) -> Tensor:
        """The chance, `[n]`; takes normed states, `[n, hidden]`, as the exit head reads them."""
        return self.model(self.candidates.features(states, ngrams).to(self.model.mean))


def candidate_readout(readout: Readout, tokens: Tensor | None) -> CandidateReadout | None:
    """Reads an artifact's candidates; None if it has none."""
    return None if tokens is None else CandidateReadout(readout, tokens)
