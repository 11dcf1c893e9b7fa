"""Contribution metrics: stateful torchmetrics that call the functions of ``flsv.functional`` and store their results.

By the question that they answer:

- Whose updates agree with the majority? ClassSpecificShapley, CosineGradientShapley.
- How much does a round lose without a client? CoalitionValue and its presets PartialFederatedShapley,
  CumulativeShapley, SurrogateFederatedShapley, DecayedShapley, OneRoundShapley, LeaveOneOut. Mixed
  with agreement, BlendedContribution.
- How much does each client add to coalitions of others, by training each alone? ShadowShapley.
- Whose updates lower the validation loss? GradientShapley, GradientAgreement.
- Whose data resemble the validation data? WassersteinContribution, CalibratedOTGradient.
- Who is useful to the other clients? ContributionEstimation, DomainRelevance.
- How much does taking part cost a client? CommunicationCost, PrivacyLoss.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
