from pfl.metrics import Metrics
from pfl.postprocessor.base import Postprocessor


class ByRecords(Postprocessor):
    def __init__(self, most):
        self.most = most

    def postprocess_one_user(self, *, stats, user_context):
        weight = min(1.0, user_context.num_datapoints / self.most)
        return stats.apply_elementwise(lambda update: update * weight), Metrics()
