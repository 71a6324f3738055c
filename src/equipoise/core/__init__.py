"""Small helpers that everything else uses: the task, parameters, random streams, files, devices."""
