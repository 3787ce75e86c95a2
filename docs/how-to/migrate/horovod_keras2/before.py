"""Digits with Horovod's Keras API, in words of Keras 2 and TensorFlow 1 that newer releases refuse.

    horovodrun -np 2 python before.py
"""

import horovod.keras as hvd
import keras
import tensorflow as tf
from keras import backend as K
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.models import Sequential
from keras.preprocessing.image import ImageDataGenerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

hvd.init()

# One GPU for each process.
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

x, y = load_digits(return_X_y=True)
x, y = x.reshape(-1, 8, 8, 1).astype("float32") / 16, keras.utils.to_categorical(y, 10)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

model = Sequential()
model.add(Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)))
model.add(MaxPooling2D())
model.add(Flatten())
model.add(Dense(64, activation="relu"))
model.add(Dense(10, activation="softmax"))

rate = 0.003 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(lr=rate))
model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"], experimental_run_tf_function=False)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("digits.h5"))

# Each process trains on images of its own, moved sideways by up to a tenth.
x_train, y_train = x_train[hvd.rank()::hvd.size()], y_train[hvd.rank()::hvd.size()]
images = ImageDataGenerator(width_shift_range=0.1)
model.fit_generator(images.flow(x_train, y_train, batch_size=32), epochs=12, callbacks=callbacks, verbose=0,
                    workers=2)

loss, accuracy = model.evaluate_generator(ImageDataGenerator().flow(x_test, y_test, shuffle=False))
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
