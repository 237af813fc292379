"""A method of one's own: Dr. GRPO with an unbiased baseline, compared with the original on the toy language."""

from apportion import methods
from apportion.core.parts import LeaveOneOut
from apportion.toy.language import language
from apportion.toy.train import preset, train

for method in (methods.dr_grpo, methods.dr_grpo.replace(baseline=LeaveOneOut())):
    final = train(preset(method), language("toy"), steps=300).final
    print(f"{method.name:<40} expected reward {final['expected_reward']:.3f}")
