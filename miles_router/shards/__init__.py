"""One router on several processes.

duty      what one process does of a router; by default all of it
peers     which of how many processes this one is
control/  who decides, who follows, and what all processes count
owners/   which process has which session or text, and how a connection gets there
"""
