"""Candidates: the exit head read for a few tokens only, to reject most tokens without all of it.

Candidates are the tokens that n-grams predict and those that the model predicts most often. That a
few candidates tell whether to read the head is an idea of Xu et al., "SpecEE", 2025; theirs are the
tokens of a draft model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from tide.errors import UnsupportedModelError
from tide.exits.heads import Readout
from tide.models.runner import scale_logits


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
        self.readout, self.weight, self.bias = readout, weight, bias
        vocabulary, device = readout.vocabulary, weight.device
        if vocabulary is None:
            vocabulary = torch.arange(readout.size, device=device)
        self.tokens = tokens.to(device)
        # Where each token id stands among those that are read; -1 for none, and at the end.
        place = torch.full((readout.size + 1,), -1, device=device)
        place[vocabulary] = torch.arange(len(vocabulary), device=device)
        some = place[self.tokens]
        self.fixed_weight = weight.detach()[some].contiguous()  # [c, hidden]
        self.fixed_bias = None if bias is None else bias.detach()[some]
        self.place = place

    def features(self, states: Tensor, ngrams: Tensor) -> Tensor:
        """The feature "candidates" of a confidence model, `[n, 7]`.

        Log-probabilities among the candidates of the second, the first, and what context and table
        predict; the logit of the first; how long the context's match is, and the table's chance.
        A prediction that is also among the others counts twice, which is cheaper than to look.

        Args:
            states: normed, `[n, hidden]`.
            ngrams: what n-grams predict, `[n, 4]`; see `gather_features`.
        """
        device = self.weight.device
        states, ngrams = states.to(device), ngrams.to(device)
        place = self.place[ngrams[:, ::2]]  # of context and table, [n, 2]; of -1, the last
        few = (self.weight[place] * states[:, None]).sum(-1)
        if self.bias is not None:
            few = few + self.bias[place]
        logits = torch.cat([linear(states, self.fixed_weight, self.fixed_bias), few], -1)
        logits = scale_logits(self.readout.config, logits).float()
        logits[:, -2:].masked_fill_(place < 0, -torch.inf)
        top = logits.topk(2, dim=-1).values
        chances = torch.cat([top, logits[:, -2:]], -1) - logits.logsumexp(-1, keepdim=True)
        told = ngrams[:, 1::2].float()  # length of the match, and the chance in 255ths
        return torch.cat([chances.clamp_min(-20), top[:, :1], told], -1)


def candidate_readout(readout: Readout, tokens: Tensor | None) -> CandidateReadout | None:
    """Reads an artifact's candidates; None if it has none."""
    return None if tokens is None else CandidateReadout(readout, tokens)
