"""On-policy distillation: the reverse KL from the policy (student) to a teacher on tokens that the policy wrote.

Pure torch. k trained tokens of a pack one after another, n most likely tokens of the teacher at the place of each. Both
policies' log-probs are of whole softmaxes; formulas survive k = 0 and samples without tokens. Values are computed in
float64 where they are differences of near numbers, and returned in the type of the student's.
"""

from __future__ import annotations

import torch

REST_FLOOR = 1e-7
"""Least probability of the tokens outside of the teacher's n that counts: less is rounding of float32 log-probs."""


def reverse_kl_advantage(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """log teacher − log student of each sampled token, [k]: minus the one-sample estimate of KL(student ‖ teacher).

    Weighted and added to the advantages it makes the policy gradient that of the reverse KL, with a discount of 0: each
    token answers for its own place only.
    Formula: the single-step part of the policy gradient of Gu et al., "MiniLLM" (2024), §2.2; as an advantage: Lu &
    Thinking Machines Lab, "On-Policy Distillation" (2025).

    Args:
        student: float32 [k], by the policy as the step finds it, without gradient.
        teacher: float32 [k].
    """
    return teacher - student


def top_k_reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student ‖ teacher) over the teacher's n most likely tokens and one outcome for all others, [k].

    Σ_j s_j (log s_j − log t_j) + s_r (log s_r − log t_r) with s_r = 1 − Σ s_j, t_r = 1 − Σ t_j. By the log sum
    inequality it is between 0 and the KL over the whole vocabulary; it is 0 only where both agree on the n tokens, and
    equals the whole KL when these are all. Without the other outcome the sum would be smallest where the student leaves
    the teacher's tokens.
    Formula: the reverse KL of Agarwal et al., "On-policy distillation of language models" (2024), §3; Cover & Thomas,
    "Elements of Information Theory" (2006), theorem 2.7.1.

    Args:
        student: [k, n], log-probs of the teacher's tokens by the current policy, with gradient.
        teacher: [k, n], log-probs by the teacher.
    """
    s, t = student.double(), teacher.double()
    probability = s.exp()
    inside = (probability * (s - t)).sum(-1)
    student_rest = (1 - probability.sum(-1)).clamp(min=REST_FLOOR)
    teacher_rest = (1 - t.exp().sum(-1)).clamp(min=REST_FLOOR)
    return (inside + student_rest * (student_rest.log() - teacher_rest.log())).to(student.dtype)
