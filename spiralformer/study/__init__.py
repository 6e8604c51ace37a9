"""The paper's experiments as declared studies: many small runs, one table, computed verdicts.

spec     a study's file and a scale become rows: models, budgets, claims
run      the rows and sweeps of learning rates as calls of `train`, side by side in processes
records  what the runs came to: the small JSON that everything below is made from
stats    paired differences, their intervals, and the rule behind every verdict
figures  the study's pictures
page     the table, the verdicts and the page"""
